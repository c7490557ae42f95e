"""Temporary files of killed writers are removed from the caches; entries and files of running writers stay."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from wfm_ds.data.captioned_folder import CaptionReader
from wfm_ds.language.packed_sequences import SizeCache
from wfm_ds.models.assets import cache_cleanup
from wfm_ds.models.assets.text_cache import TEXT_FOLDER
from wfm_ds.storage import atomic, tensor_store
from wfm_ds.storage.tensor_store import TensorStore

OLD_S = time.time() - atomic.STALE_S - 60


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path / "user"))
    return tmp_path / "user"


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while(write):
    """Call `write` in a child process that is killed before it renames its temporary file."""
    child = os.fork()
    if child == 0:
        Path.replace = tensor_store.save_file = die
        write()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def files_in(*folders):
    return {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def let_age(paths):
    for path in paths:
        os.utime(path, (OLD_S, OLD_S))


def test_old_files_of_killed_writers_are_removed_from_caches(tmp_path, user_cache):
    own = tmp_path / "own"
    row = {"latents": torch.zeros(2)}
    stores = [
        TensorStore(own / "latents"),
        TensorStore(own / TEXT_FOLDER),
        TensorStore(user_cache / TEXT_FOLDER / "key"),
    ]
    for store in stores:
        store.write({"number": 0}, row)
    entries = files_in(own, user_cache)
    captions = CaptionReader(tmp_path, user_cache)
    (tmp_path / "a.txt").write_text("a cat")
    captions.read(str(tmp_path / "a.txt"), bytes.decode)
    for write in [
        *[lambda store=store: store.write({"number": 1}, row) for store in stores],
        captions.save,
        lambda: SizeCache(own, "key").write([]),
        lambda: atomic.write_text(own / "tars" / "00" / "index.json", "{}"),
    ]:
        (own / "tars" / "00").mkdir(parents=True, exist_ok=True)
        kill_while(write)
    left = files_in(own, user_cache) - entries
    assert len(left) == 6
    cache_cleanup.remove_temporary_files(own, time.time())
    assert files_in(own, user_cache) == entries | left, "their writers may still run"
    let_age([*left, *entries])
    cache_cleanup.remove_temporary_files(own, time.time())
    assert files_in(own, user_cache) == entries


def test_only_temporary_files_and_folders_are_removed(tmp_path, user_cache):
    foreign = [user_cache / "captions" / name for name in (".notes.part", "0123456789abcdef.part")]
    making = user_cache / "tiny" / "key" / ".making-abcd_123"
    for path in (*foreign, making / "pipeline" / "weights"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    let_age([*foreign, *making.rglob("*"), making])
    cache_cleanup.remove_temporary_files(None, time.time())
    assert files_in(user_cache) == set(foreign)
    assert not making.exists()


def test_the_next_temporary_folder_removes_old_ones_with_its_prefix(tmp_path):
    for name in (".wfm-abcd1234", ".wfm-convert-abcd1234", ".wfm-young123", ".wfm-mine"):
        (tmp_path / name / "file").mkdir(parents=True)
    for name in (".wfm-abcd1234", ".wfm-convert-abcd1234", ".wfm-mine"):
        let_age([tmp_path / name / "file", tmp_path / name])
    with atomic.temporary_folder(tmp_path, ".wfm-") as folder:
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {".wfm-convert-abcd1234", ".wfm-young123", ".wfm-mine", folder.name}
    assert not folder.exists()
