"""Checkpoint folders: which are complete, which is the newest, and which are kept. tests/faults tests writing them."""

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.checkpoint import store


def checkpoint(root, step):
    """Write a complete checkpoint of two ranks: two files per rank, all listed in COMPLETE."""
    folder = root / f"step_{step}"
    (folder / "zero").mkdir(parents=True)
    files = {}
    for rank in range(2):
        for name in (f"zero/optimizer_{rank}.pt", f"own_{rank}.safetensors"):
            (folder / name).write_bytes(bytes(100 + rank))
            files[name] = 100 + rank
    marker = {"step": step, "world_size": 2, "facts": {"metrics_bytes": 7}, "files": files}
    (folder / store.COMPLETE).write_text(json.dumps(marker))
    return folder


PIPE = object()


@check_each(
    ("name", "content", "reason"),
    [
        ("zero/optimizer_1.pt", bytes(40), "zero/optimizer_1.pt has 40 bytes instead of 101"),
        ("own_0.safetensors", bytes(101), "own_0.safetensors has 101 bytes instead of 100"),
        ("own_1.safetensors", None, "own_1.safetensors cannot be read (No such file or directory)"),
        ("own_1.safetensors", PIPE, "own_1.safetensors cannot be read (is not a regular file)"),
        (store.COMPLETE, None, "COMPLETE cannot be read (No such file or directory)"),
        (store.COMPLETE, PIPE, "COMPLETE cannot be read (is not a regular file)"),
        (store.COMPLETE, b"[" * 100_000, "COMPLETE is damaged"),
        (store.COMPLETE, b'{"step": 3, "files"', "COMPLETE is damaged"),
        (store.COMPLETE, b'{"step": 3, "world_size": 2, "facts": {}, "files": ["a"]}', "COMPLETE is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(tmp_path, caplog, name, content, reason):
    older, newer = checkpoint(tmp_path, 2), checkpoint(tmp_path, 3)
    assert store.find_newest(tmp_path).path == newer
    assert store.find_flaw(newer) is None
    (newer / name).unlink()
    if content is PIPE:
        os.mkfifo(newer / name)
    elif content is not None:
        (newer / name).write_bytes(content)
    assert store.read_checkpoint(newer) is None
    assert store.find_newest(tmp_path).path == older
    assert [record.getMessage() for record in caplog.records] == [f"{newer} is skipped: {reason}"]


def test_a_folder_without_checkpoints_gives_none(tmp_path):
    assert store.find_newest(tmp_path / "nowhere") is None
    (tmp_path / "step_4.tmp").mkdir()
    (tmp_path / "step_04").mkdir()
    (tmp_path / "LATEST").write_text("step_4\n")
    assert store.find_newest(tmp_path) is None


def test_the_newest_checkpoint_has_the_highest_number(tmp_path):
    for step in (9, 10, 100, 0):
        checkpoint(tmp_path, step)
    found = store.find_newest(tmp_path)
    assert (found.path, found.step) == (tmp_path / "step_100", 100)
    assert (found.world_size, found.metadata) == (2, {"metrics_bytes": 7})


@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.integers(1, 5))
def test_pruning_keeps_the_newest_checkpoints_up_to_the_current_step(tmp_path_factory, others, newest, keep):
    root = tmp_path_factory.mktemp("root")
    for step in others | {newest}:
        (root / f"step_{step}").mkdir()
    store.prune_checkpoints(root, newest=newest, keep=keep)
    left = store.list_steps(root)
    assert newest in left
    assert sorted(left) == sorted(step for step in others | {newest} if step <= newest)[-keep:]
