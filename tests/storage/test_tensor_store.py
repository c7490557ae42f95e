"""An entry is complete or absent, even if several threads write it or a writer is killed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.storage.tensor_store import TensorStore

KEY = {"family": "sd3", "text": "a cat/../\u4e2d", "length": 77}


def tensors(seed=0):
    made = torch.Generator().manual_seed(seed)
    return {
        "embeds": torch.randn(1, 5, 8, generator=made).to(torch.bfloat16),
        "mask": torch.ones(1, 5, dtype=torch.int64),
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_many_writers_of_one_entry_leave_one_complete_file(tmp_path):
    store = TensorStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.write(KEY, tensors()), range(64)))
    assert equal(store.read(KEY), tensors())


def test_an_entry_is_read_only_under_its_key(tmp_path):
    store = TensorStore(tmp_path)
    assert KEY not in store
    assert store.read(KEY) is None
    store.write(KEY, tensors())
    assert KEY in store
    assert equal(store.read(dict(reversed(KEY.items()))), tensors())  # the order of the keys has no effect
    for change in ({"text": "a dog"}, {"length": 78}, {"more": None}):
        assert store.read(KEY | change) is None
    store.write(KEY, tensors(1))
    assert equal(store.read(KEY), tensors(1))


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=20), st.integers(), st.none(), st.booleans())))
def test_texts_of_keys_are_not_in_file_names(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("store")
    TensorStore(folder).write(key, {"a": torch.zeros(1)})
    (path,) = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    digest = path.name.removesuffix(".safetensors")
    assert (len(digest), int(digest, 16) >= 0, str(path.parent)) == (64, True, digest[:2])


def entry(folder):
    (path,) = (p for p in folder.rglob("*") if p.is_file())
    return path


@check_each("damage", ["short", "empty", "text", "other key"])
def test_a_damaged_entry_is_absent_and_can_be_written_again(tmp_path, damage):
    store = TensorStore(tmp_path)
    store.write(KEY, tensors())
    path = entry(tmp_path)
    content = path.read_bytes()
    other = content.replace(b"a cat", b"a dog")
    assert other != content
    path.write_bytes({"short": content[:-3], "empty": b"", "text": b"<html>" * 9, "other key": other}[damage])
    assert KEY not in store
    assert store.read(KEY) is None
    store.write(KEY, tensors())
    assert equal(store.read(KEY), tensors())


def test_the_umask_decides_who_can_read_an_entry(tmp_path):
    before = os.umask(0o027)
    try:
        TensorStore(tmp_path).write(KEY, tensors())
    finally:
        os.umask(before)
    assert entry(tmp_path).stat().st_mode & 0o777 == 0o640


def test_a_writer_that_is_killed_leaves_no_entry(tmp_path):
    """Killed between writing and renaming, the worst moment."""
    code = (
        "import os, signal, sys, json, torch\n"
        "from pathlib import Path\n"
        "from wfm_ds.storage import atomic\n"
        "from wfm_ds.storage.tensor_store import TensorStore\n"
        "atomic.sync_to_disk = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "TensorStore(Path(sys.argv[1])).write(json.loads(sys.argv[2]), {'a': torch.zeros(3)})\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path), json.dumps(KEY)], timeout=60)
    assert killed.returncode == -9
    assert any(name.endswith(".part") for name in os.listdir(entry(tmp_path).parent))
    assert KEY not in TensorStore(tmp_path)
    TensorStore(tmp_path).write(KEY, tensors())
    assert equal(TensorStore(tmp_path).read(KEY), tensors())
