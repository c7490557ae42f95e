"""Async runs with rollout workers: on-policy, they equal colocated runs on any number of ranks and after a resume."""

import json

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_same_runs, records
from wfm_ds.transport.keys import create_key_pair

COMMON = [
    "optimizer.eps=1e-4",
    "optimizer.lr=3e-2",
    "run.steps=3",
    "logging.console=false",
    "validation.at_start=false",
]
OLD = "algorithm.old_decay={initial: 0.6, slope: 0, max: 0.6}"  # makes the old policy differ from the trained policy
ON_POLICY = ["rollout.mode=async", "rollout.max_staleness=0"]
GRPO = ["optimizer.lr=3e-3", "algorithm.clip_ratio=0.03"]


@pytest.fixture
def train(one_rank, two_ranks, tiny_pipelines, tmp_path):
    """Return a function that trains a tiny recipe into tmp_path/where."""

    def run(where, name, *overrides, ranks=1):
        group = one_rank if ranks == 1 else two_ranks
        recipe = tiny_recipe(name, tmp_path / where, tiny_pipelines("sd3"), *COMMON, *overrides)
        return group.run(train_on_rank, **recipe)

    return run


def train_beside_a_worker(recipe, overrides, output):
    """Run a rank and a worker in two threads of one process. They still communicate through the broker."""
    import threading
    from pathlib import Path

    from multi_rank.resuming import train_on_rank
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.rollout.remote import worker

    stop, tick, codes = threading.Event(), threading.Event(), []

    def generate():
        pipes = Path(output) / "rollout" / "pipes.json"
        while not pipes.exists() and not stop.is_set():
            tick.wait(0.05)
        resolved = Path(output) / "recipe.yaml"
        args = worker.parser().parse_args(
            [str(resolved), "--connect", str(pipes), "--device", "cpu", "--name", "beside"]
        )
        codes.append(worker.serve_chunks(recipe_file.load_recipe(resolved), args, stop, threading.Event()))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    try:
        ended = train_on_rank(recipe, overrides)
    finally:
        stop.set()
        thread.join(60)
    return ended | {"codes": codes}


def updates(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss/total" in line]


@pytest.mark.unit
def test_a_rank_trains_on_the_samples_of_a_worker(one_rank, tiny_pipelines, tmp_path):
    keys, output = tmp_path / "keys", tmp_path / "async"
    create_key_pair(keys, "hub")
    overrides = [
        *[*COMMON, *ON_POLICY, "run.steps=2", "logging.tensorboard=false", "validation.num_prompts=1"],
        *["reward.functions=[{name: jpeg_compressibility}]", "rollout.spawn=0", "rollout.bind=tcp://127.0.0.1:0"],
        *[f"rollout.keys={keys}", f"rollout.policy_folder={tmp_path / 'policies'}"],
    ]
    (ended,) = one_rank.run(
        train_beside_a_worker, **tiny_recipe("sd3_nft", output, tiny_pipelines("sd3"), *overrides), output=str(output)
    )
    assert list((tmp_path / "policies").iterdir()) == []  # the run removed the policies that it wrote there
    assert (ended["status"], ended["step"], ended["codes"]) == ("finished", 2, [0])
    steps = updates(output)
    assert [(s["rollout/staleness_max"], s["rollout/workers"], s["rollout/samples"]) for s in steps] == [(0, 1, 8)] * 2
    assert steps[0]["reward/jpeg_compressibility/mean"] != steps[1]["reward/jpeg_compressibility/mean"]
    assert not any("perf/forwards_rollout" in s for s in steps)


@pytest.mark.long
def test_nft_with_workers_equals_nft_without_workers(train, tmp_path):
    train("colocated", "sd3_nft", OLD)
    train("async", "sd3_nft", OLD, *ON_POLICY)
    assert_same_runs(tmp_path / "colocated", tmp_path / "async")
    steps = updates(tmp_path / "async")
    assert [s["rollout/staleness_max"] for s in steps] == [0, 0, 0]
    assert [s["rollout/dropped_stale"] for s in steps] == [0, 0, 0]
    assert steps[-1]["nft/old_deviation"] > 1e-5, "the published policy is another one than the trained"
    assert not any("perf/forwards_rollout" in s for s in steps)
    left = {path.name for path in (tmp_path / "async").iterdir()}
    assert "policy" not in left
    assert [path.name for path in (tmp_path / "async" / "rollout").iterdir()] == ["spawned-0.log"]


@pytest.mark.parametrize("name", [pytest.param("sd3_mix_grpo", marks=pytest.mark.long), "sd3_flow_grpo"])
def test_flow_grpo_with_workers_equals_flow_grpo_without_workers(name, train, tmp_path):
    train("colocated", name, *GRPO)
    train("async", name, *GRPO, *ON_POLICY, ranks=2)
    assert_same_runs(tmp_path / "colocated", tmp_path / "async")
    first = updates(tmp_path / "async")[0]
    assert first["policy/ratio_start_abs_dev"] < 1e-6, "workers and ranks agree about log-probabilities"


@pytest.mark.parametrize(("name", "changes"), [("sd3_nft", [OLD]), ("sd3_mix_grpo", GRPO)])
@pytest.mark.long
def test_sequence_parallelism_works_with_workers_and_keys(name, changes, train, tmp_path):
    shared = "engine.sequence_parallel=2"
    create_key_pair(tmp_path / "keys", "hub")
    keys = ["rollout.bind=tcp://127.0.0.1:0", f"rollout.keys={tmp_path / 'keys'}"]
    train("colocated", name, *changes)
    train("colocated shared", name, *changes, shared, ranks=2)
    train("async", name, *changes, *ON_POLICY, *keys, shared, ranks=2)
    assert_same_runs(tmp_path / "colocated", tmp_path / "async")
    assert_same_runs(tmp_path / "colocated shared", tmp_path / "async")


def test_all_weights_are_published_from_shards(train, tmp_path):
    full = ["lora=null", "optimizer.lr=1e-3", OLD]
    train("colocated", "sd3_nft", *full)
    train("async", "sd3_nft", *full, *ON_POLICY, "engine.deepspeed=zero3", "engine.max_forward_batch=3", ranks=2)
    assert_same_runs(tmp_path / "colocated", tmp_path / "async")


def test_a_run_resumes_with_new_workers(train, tmp_path):
    train("whole", "sd3_nft", OLD)
    (ended,) = train("async", "sd3_nft", OLD, *ON_POLICY, "checkpoint.every=1", "run.steps=1")
    assert (ended["status"], ended["step"]) == ("finished", 1)
    (ended,) = train("async", "sd3_nft", OLD, *ON_POLICY, "checkpoint.every=1")
    assert (ended["status"], ended["step"]) == ("finished", 3)
    assert_same_runs(tmp_path / "whole", tmp_path / "async")


@pytest.mark.long
def test_samples_are_at_most_as_stale_as_the_bound(train, tmp_path):
    more = ["run.steps=6", "rollout.mode=async", "rollout.max_staleness=2", "rollout.in_flight=3", "rollout.spawn=2"]
    train("async", "sd3_flow_grpo", *GRPO, *more)
    steps = [s for s in updates(tmp_path / "async") if "rollout/staleness_max" in s]
    assert len(steps) == 6
    assert steps[0]["rollout/staleness_max"] == 0
    assert 1 <= max(s["rollout/staleness_max"] for s in steps) <= 2
    assert any(s["policy/drift"] > 0 for s in steps)
    assert all(s["rollout/samples"] == 8 for s in steps)
    assert len(records(tmp_path / "async")) > 6
