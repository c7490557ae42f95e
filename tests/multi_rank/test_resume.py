"""Resumed runs equal uninterrupted runs bit for bit."""

import json
from pathlib import Path

import pytest
import torch

from multi_rank.resuming import CASES, STEPS, assert_equal_runs, records, settings, train_on_rank, weights
from multi_rank.same_runs import assert_same_runs
from multi_rank.training import build, full_tensors, plain_step
from wfm_ds.checkpoint.sharded_states import capture_state, rank_file_name, restore_state
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.errors import UserError
from wfm_ds.export.target import ExportTarget


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Digits with every tenth image corrupt, because checkpoints must contain the counts of bad files."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    for image in sorted((folder / "images").glob("*.png"))[::10]:
        image.write_bytes(b"")
    return folder


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize(
    ("case", "stop_at"),
    [*((case, 2) for case in CASES), ("sft lora zero2", 0)],
)
@pytest.mark.ci_cases("nft lora zero2-2", "sft full zero3-2", "dmd2 lora zero2-2")
def test_a_resumed_run_equals_an_uninterrupted_run(case, stop_at, two_ranks, tiny_pipelines, digits, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sources = {"model": tiny_pipelines("sd3"), "digits": digits}
    two_ranks.run(train_on_rank, **settings(case, whole, **sources))
    assert not (whole / "checkpoints").exists()  # checkpoint.every is 0
    if case.startswith("sft"):
        steps = [record for record in records(whole) if "sft/loss" in record]
        broken = [sum(value for tag, value in step.items() if tag.startswith("data/bad/")) for step in steps]
        assert 0 < broken[1] < broken[3]  # counters are cumulative
    for result in two_ranks.run(train_on_rank, **settings(case, parts, **sources), stop_at=stop_at):
        assert (result["status"], result["step"]) == ("preempted", stop_at)
    assert json.loads((parts / "result.json").read_text())["status"] == "preempted"
    assert names(parts / "checkpoints") == ["LATEST", f"step_{stop_at}"]
    for result in two_ranks.run(train_on_rank, **settings(case, parts, **sources)):
        assert (result["status"], result["step"]) == ("finished", STEPS)
    assert_equal_runs(parts, whole)


def test_a_new_run_starts_from_an_interval_checkpoint_of_another_run(two_ranks, tiny_pipelines, digits, tmp_path):
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    sources = {"model": tiny_pipelines("sd3"), "digits": digits}
    saving = ["checkpoint.every=3", "checkpoint.keep=5"]
    two_ranks.run(train_on_rank, **settings("sft lora zero2", whole, **sources, changes=saving), save_at=1)
    # Step 1 was requested by SIGUSR1, step 3 is due to checkpoint.every, and step 4 is the last.
    assert names(whole / "checkpoints") == ["LATEST", "step_1", "step_3", "step_4"]
    begin = settings("sft lora zero2", branch, **sources, changes=[f"run.resume={whole / 'checkpoints' / 'step_3'}"])
    two_ranks.run(train_on_rank, **begin, stop_at=0)  # a stop before the first step also saves a checkpoint
    assert names(branch / "checkpoints") == ["LATEST", "step_3"]
    two_ranks.run(train_on_rank, **begin)
    before = next(i for i, record in enumerate(records(whole)) if record["step"] == 4)
    assert records(branch) == records(whole)[before:]
    ours, theirs = weights(branch, STEPS), weights(whole, STEPS)
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("case", "alone"),
    [
        ("nft lora zero2", ["engine.deepspeed=zero3"]),
        ("nft full zero3", ["engine.deepspeed=zero1"]),
        ("sft lora zero2", ["engine.gradient_accumulation=4"]),
        ("sft full zero3", ["engine.deepspeed=zero2", "engine.gradient_accumulation=4", "model.dtype=float32"]),
    ],
)
@pytest.mark.ci_cases("nft lora zero2-alone0")
def test_a_run_resumes_with_other_ranks_and_zero_stages(
    case, alone, one_rank, two_ranks, tiny_pipelines, digits, tmp_path
):
    """Train on two ranks, resume on one rank with another sharding, then resume on two ranks."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sources = {"model": tiny_pipelines("sd3"), "digits": digits}
    smooth = ["optimizer.eps=1e-4", "model.dtype=float32"]
    two_ranks.run(train_on_rank, **settings(case, whole, **sources, changes=smooth))
    two_ranks.run(train_on_rank, **settings(case, parts, **sources, changes=smooth), stop_at=1)
    one_rank.run(train_on_rank, **settings(case, parts, **sources, changes=[*smooth, *alone]), stop_at=2)
    two_ranks.run(train_on_rank, **settings(case, parts, **sources, changes=smooth))
    assert_same_runs(whole, parts)


def state_read_back(folder, damage):
    """Return the error of `restore_state` for a corrupt file, or for an engine with other LoRA targets."""
    engine, folder = build("zero2", lora=True), Path(folder)
    if engine.world.is_main:
        folder.mkdir()
    engine.world.barrier()
    capture_state(engine, {"step": 5}, ExportTarget(Path("unused"), ("transformer",)), torch.float32).write_files(
        folder
    )
    if damage == "bytes" and engine.world.rank == 1:
        path = folder / rank_file_name(1)
        path.write_bytes(bytes(path.stat().st_size))
    targets = ["to_q", "to_k", "to_out.0"] if damage == "targets" else None
    other = build("zero2", lora=True, targets=targets)
    try:
        return str(restore_state(other, folder, 2))
    except UserError as error:
        return str(error)


def reference_read_back(folder):
    """Save a full run and restore it. Return the saved states, whether the policies are equal, and the distances."""
    engine, folder = build("zero2", lora=False, policies={"old", "ref"}), Path(folder)
    for step in range(2):
        engine.update_policy("old", 0.0)
        plain_step(engine, step)
    if engine.world.is_main:
        folder.mkdir()
    engine.world.barrier()
    capture_state(engine, {}, ExportTarget(Path("unused"), ("transformer",)), torch.float32).write_files(folder)
    engine.world.barrier()
    other = build("zero2", lora=False, policies={"old", "ref"})
    restore_state(other, folder, 2)
    equal = {}
    for policy in ("train", "old", "ref"):
        before, after = full_tensors(engine, policy), full_tensors(other, policy)
        equal[policy] = all(torch.equal(before[name], after[name]) for name in before)
    return sorted(engine.shard_states()), equal, [engine.policy_distance("old"), engine.policy_distance("ref")]


def test_the_frozen_reference_is_the_base_model_and_not_stored(two_ranks, tmp_path):
    for states, equal, distances in two_ranks.run(reference_read_back, folder=str(tmp_path / "state")):
        assert states == ["old", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step", "train"]
        assert equal == {"train": True, "old": True, "ref": True}
        assert 0 < distances[0] < distances[1]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "{'step': 5}"),
        ("bytes", "wfm_rank00001.safetensors cannot be read"),
        ("targets", "has other trained weights than this run, e.g. "),
    ],
)
def test_unusable_states_are_refused_by_all_ranks(two_ranks, tmp_path, damage, said):
    for message in two_ranks.run(state_read_back, folder=str(tmp_path / "state"), damage=damage):
        assert said in message
