"""Checkpoint folders: which are complete, which is the newest, and which are kept. tests/faults tests writing them."""

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.checkpoint import store


def checkpoint(root, step, world_size=2, facts=None):
    """Write a complete checkpoint: two files per rank, all listed in COMPLETE."""
    folder = root / f"step_{step}"
    (folder / "zero").mkdir(parents=True)
    files = {}
    for rank in range(world_size):
        for name in (f"zero/optimizer_{rank}.pt", f"own_{rank}.safetensors"):
            (folder / name).write_bytes(bytes(100 + rank))
            files[name] = 100 + rank
    marker = {"step": step, "world_size": world_size, "facts": facts or {"metrics_bytes": 7}, "files": files}
    (folder / store.COMPLETE).write_text(json.dumps(marker))
    return folder


def test_a_complete_checkpoint_is_read_back(tmp_path):
    folder = checkpoint(tmp_path, 12, world_size=3, facts={"metrics_bytes": 99})
    found = store.read_checkpoint(folder)
    assert (found.path, found.step, found.world_size, found.metadata) == (folder, 12, 3, {"metrics_bytes": 99})


def truncate(folder):
    (folder / "zero" / "optimizer_1.pt").write_bytes(bytes(40))


def lengthen(folder):
    (folder / "own_0.safetensors").write_bytes(bytes(101))


def lose_a_file(folder):
    (folder / "own_1.safetensors").unlink()


def lose_the_marker(folder):
    (folder / store.COMPLETE).unlink()


def replace_a_file_by_a_pipe(folder):
    lose_a_file(folder)
    os.mkfifo(folder / "own_1.safetensors")


def replace_the_marker_by_a_pipe(folder):
    lose_the_marker(folder)
    os.mkfifo(folder / store.COMPLETE)


def nest_the_marker(folder):
    (folder / store.COMPLETE).write_text("[" * 100_000)


def garble_the_marker(folder):
    (folder / store.COMPLETE).write_text('{"step": 3, "files"')


def misshape_the_marker(folder):
    (folder / store.COMPLETE).write_text('{"step": 3, "world_size": 2, "facts": {}, "files": ["a"]}')


@check_each(
    ("damage", "reason"),
    [
        (truncate, "zero/optimizer_1.pt has 40 bytes instead of 101"),
        (lengthen, "own_0.safetensors has 101 bytes instead of 100"),
        (lose_a_file, "own_1.safetensors cannot be read (No such file or directory)"),
        (lose_the_marker, "COMPLETE cannot be read (No such file or directory)"),
        (replace_a_file_by_a_pipe, "own_1.safetensors cannot be read (is not a regular file)"),
        (replace_the_marker_by_a_pipe, "COMPLETE cannot be read (is not a regular file)"),
        (nest_the_marker, "COMPLETE is damaged"),
        (garble_the_marker, "COMPLETE is damaged"),
        (misshape_the_marker, "COMPLETE is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(tmp_path, caplog, damage, reason):
    older, newer = checkpoint(tmp_path, 2), checkpoint(tmp_path, 3)
    assert store.find_newest(tmp_path).path == newer
    assert store.find_flaw(newer) is None
    damage(newer)
    assert store.read_checkpoint(newer) is None
    assert store.find_newest(tmp_path).path == older
    assert [record.getMessage() for record in caplog.records] == [f"{newer} is skipped: {reason}"]


def test_a_folder_without_checkpoints_gives_none(tmp_path):
    assert store.find_newest(tmp_path / "nowhere") is None
    (tmp_path / "step_4.tmp").mkdir()
    (tmp_path / "step_04").mkdir()
    (tmp_path / "LATEST").write_text("step_4\n")
    assert store.find_newest(tmp_path) is None


def test_steps_are_compared_as_numbers(tmp_path):
    for step in (9, 10, 100, 0):
        checkpoint(tmp_path, step)
    assert store.find_newest(tmp_path).step == 100


@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.integers(1, 5))
def test_pruning_keeps_the_newest_checkpoints_up_to_the_current_step(tmp_path_factory, others, newest, keep):
    root = tmp_path_factory.mktemp("root")
    for step in others | {newest}:
        (root / f"step_{step}").mkdir()
    store.prune_checkpoints(root, newest=newest, keep=keep)
    left = store.list_steps(root)
    assert newest in left
    assert sorted(left) == sorted(step for step in others | {newest} if step <= newest)[-keep:]
