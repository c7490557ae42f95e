"""Ranks that die or cannot write while they save: what was saved before stays, and the run goes on from there."""

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from multi_rank.resuming import assert_equal_runs, settings, train_on_rank, weights
from ranks import RankError
from wfm_ds.checkpoint import store
from wfm_ds.demos.digits_data import write_digits

SMALL = 20_000  # bytes: no states of a rank fit


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(root, rank, moment):
    """Save steps 1 and 2, of two files a rank; `rank` is killed just before the second `moment` is written."""
    from wfm_ds.distributed.world import World
    from wfm_ds.storage import atomic

    world, seen, write_text = World.join(), [], atomic.write_text

    def write_or_die(path, text):
        seen.append(path.name)
        if world.rank == rank and seen.count(moment) == 2:
            die()
        write_text(path, text)

    def write(folder):
        path = folder / f"state_{world.rank}"
        path.write_bytes(os.urandom(1000))
        return [path]

    atomic.write_text = write_or_die
    for step in (1, 2):
        store.CheckpointSave(Path(root), step, world, write, metadata={"metrics_bytes": step}, keep=2).commit()


@pytest.mark.parametrize(
    ("rank", "moment", "survives"),
    [
        (1, "rank_00001.ok", 1),  # its state is on disk, nobody knows
        (0, "COMPLETE", 1),  # all states and lists are on disk
        (0, "LATEST", 2),  # renamed already
    ],
)
def test_rank_killed_while_saving_leaves_the_last_complete_one(two_ranks, tmp_path, rank, moment, survives):
    with pytest.raises(RankError):
        two_ranks.run(save_and_die, root=str(tmp_path), rank=rank, moment=moment)
    found = store.find_newest(tmp_path)
    assert (found.step, found.world_size, found.metadata) == (survives, 2, {"metrics_bytes": survives})
    (tmp_path / "step_7.tmp" / "zero").mkdir(parents=True)  # of a run that was killed at a step that never comes again
    two_ranks.run(save_and_die, root=str(tmp_path), rank=9, moment=moment)  # the leftovers are in nobody's way
    assert sorted(f.name for f in tmp_path.iterdir()) == ["LATEST", "step_1", "step_2"]
    assert store.find_newest(tmp_path).step == 2


def save_into_a_read_only_folder(root):
    """Save step 1; then step 2, into a folder that nobody may write to, not even root; then step 2 once more."""
    from wfm_ds.distributed.world import World
    from wfm_ds.errors import UserError

    world, root = World.join(), Path(root)

    def save(step):
        def write(folder):
            path = folder / f"state_{world.rank}"
            path.write_bytes(bytes(100 * step))
            return [path]

        store.CheckpointSave(root, step, world, write, metadata={}, keep=2).commit()

    save(1)
    world.barrier()
    root.chmod(0o555)
    try:
        with without_roots_rights():
            save(2)
        message = None
    except UserError as error:
        message = str(error)
    newest = store.find_newest(root).step
    world.barrier()
    root.chmod(0o755)
    save(2)
    return {"message": message, "newest": newest}


@contextlib.contextmanager
def without_roots_rights():
    """This thread, and those that it starts, obey the modes of files even if the user is root (capabilities(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    before = sets[0]
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, from the effective set alone
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0


def test_a_read_only_folder_is_one_clear_error_on_all_ranks(two_ranks, tmp_path):
    for found in two_ranks.run(save_into_a_read_only_folder, root=str(tmp_path)):
        assert found["newest"] == 1
        assert found["message"] == (
            f"{tmp_path}/step_2: the checkpoint could not be written ([Errno 13] Permission denied: "
            f"'{tmp_path}/step_2.tmp'); earlier ones are intact: free space or repair the folder, then start the same "
            "command again"
        )
    assert store.find_newest(tmp_path).step == 2


def train_with_a_limit(recipe, overrides, step, lethal):
    """From the save after `step` on, no file of rank 1 may grow beyond SMALL bytes; returns this rank's error.

    If `lethal`, the kernel kills it in the middle of the first write that does; else that is an error, as on a full
    disk.
    """
    from wfm_ds.errors import UserError
    from wfm_ds.monitoring.monitor import Monitor

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if lethal else signal.SIG_IGN)
    calls, progress = [], Monitor.update_progress

    def limit_at_the_end_of(self, done, **arguments):  # the last thing that a step does before it is saved
        calls.append(done)
        if done == step and os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
        progress(self, done, **arguments)

    Monitor.update_progress = limit_at_the_end_of
    try:
        train_on_rank(recipe, overrides)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        Monitor.update_progress = progress
    return None


def test_run_outlives_a_full_disk_a_killed_rank_and_a_truncated_file(two_ranks, tiny_pipelines, tmp_path):
    """Each time the same command goes on from the checkpoint before, and in the end nothing is lost."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    write_digits(tmp_path / "digits")
    case = {"case": "sft lora zero2", "model": tiny_pipelines("sd3"), "digits": tmp_path / "digits"}
    two_ranks.run(train_on_rank, **settings(folder=whole, **case))
    run = settings(folder=out, **case, changes=["checkpoint.every=1", "checkpoint.keep=2"])

    messages = two_ranks.run(train_with_a_limit, **run, step=2, lethal=False)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{out}/checkpoints/step_2: the checkpoint could not be written (")
    assert sorted(f.name for f in (out / "checkpoints").iterdir()) == ["LATEST", "step_1"]

    with pytest.raises(RankError):
        two_ranks.run(train_with_a_limit, **run, step=3, lethal=True)
    left = sorted(f.name for f in (out / "checkpoints").iterdir())
    assert left == ["LATEST", "step_1", "step_2", "step_3.tmp"]
    assert not (out / "checkpoints" / "step_3.tmp" / "rank_00001.ok").exists()

    two_ranks.run(train_on_rank, **run)
    assert_equal_runs(out, whole)
    assert sorted(f.name for f in (out / "checkpoints").iterdir()) == ["LATEST", "step_3", "step_4"]

    first = weights(out, 4)
    (out / "result.json").unlink()  # as if it had been killed before the end
    shard = out / "checkpoints" / "step_4" / "wfm_rank00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    two_ranks.run(train_on_rank, **run)
    assert_equal_runs(out, whole)
    assert all(torch.equal(first[name], tensor) for name, tensor in weights(out, 4).items())
    assert store.find_newest(out / "checkpoints").step == 4
