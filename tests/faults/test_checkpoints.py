"""Ranks that die or fail to write while saving a checkpoint: earlier checkpoints are intact, and the run resumes."""

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

SMALL = 20_000  # bytes, smaller than the state of any rank


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(root, rank, moment):
    """Save steps 1 and 2. `rank` is killed just before it writes the file `moment` for the second time."""
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
        (1, "rank_00001.ok", 1),  # its state is on disk, but not yet confirmed
        (0, "COMPLETE", 1),  # all states and confirmations are on disk
        (0, "LATEST", 2),  # the folder has its final name already
    ],
)
def test_a_rank_killed_while_saving_leaves_the_last_complete_checkpoint(two_ranks, tmp_path, rank, moment, survives):
    with pytest.raises(RankError):
        two_ranks.run(save_and_die, root=str(tmp_path), rank=rank, moment=moment)
    found = store.find_newest(tmp_path)
    assert (found.step, found.world_size, found.metadata) == (survives, 2, {"metrics_bytes": survives})
    (tmp_path / "step_7.tmp" / "zero").mkdir(parents=True)  # left by a killed run, at a step that is not saved again
    two_ranks.run(save_and_die, root=str(tmp_path), rank=9, moment=moment)  # leftover files do not disturb later saves
    assert sorted(f.name for f in tmp_path.iterdir()) == ["LATEST", "step_1", "step_2"]
    assert store.find_newest(tmp_path).step == 2


def save_into_a_read_only_folder(root):
    """Save step 1, try to save step 2 into a read-only folder, then save step 2 with write permission."""
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
    """Make this thread and its child threads obey file modes even as root (capabilities(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    before = sets[0]
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, in the effective set only
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
    """Train with a file size limit of SMALL bytes on rank 1 from the save after `step` on. Return this rank's error.

    With `lethal`, the kernel kills rank 1 in the middle of the first write over the limit. Otherwise that write fails,
    as on a full disk.
    """
    from wfm_ds.errors import UserError
    from wfm_ds.monitoring.monitor import Monitor

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if lethal else signal.SIG_IGN)
    calls, progress = [], Monitor.update_progress

    def limit_at_the_end_of(self, done, **arguments):  # the last call of a step before its save
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
    """After each fault, the same command resumes from the last checkpoint and ends like an undisturbed run."""
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
    (out / "result.json").unlink()  # as if the run had been killed before its end
    shard = out / "checkpoints" / "step_4" / "wfm_rank00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    two_ranks.run(train_on_rank, **run)
    assert_equal_runs(out, whole)
    assert all(torch.equal(first[name], tensor) for name, tensor in weights(out, 4).items())
    assert store.find_newest(out / "checkpoints").step == 4
