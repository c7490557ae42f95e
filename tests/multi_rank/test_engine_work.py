"""The speed metrics of a run equal independently counted FLOPs divided by the measured step time."""

import json

import pytest

from benchmarks.flops import CountedModel, count_sample_flops, step_forwards
from benchmarks.forward_counts import flops_by_purpose
from multi_rank.resuming import tiny_recipe, train_on_rank
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes

PEAK = 0.5  # TFLOP/s
COMMON = [
    *("logging.console=false", "logging.sample_every=0", f"logging.peak_tflops={PEAK}"),
    *("validation.at_start=true", "validation.every=0", "run.steps=2"),
]
RL = ["algorithm.zero_std=keep", "sampling.guidance_scale=2"]


def counted_work(folder, world_size):
    """Return (all FLOPs, FLOPs of recomputed forwards) of one rank per step, counted by benchmarks/flops.py."""
    recipe = recipe_file.load_recipe(folder / "recipe.yaml")
    subject = CountedModel.from_recipe(recipe)
    flops, derived = count_sample_flops(recipe, subject), derive_run_sizes(recipe, world_size)
    steps = step_forwards(recipe, derived, subject.model)
    share = recipe.engine.sequence_parallel
    found = []
    for step in steps * (recipe.run.steps // len(steps)):
        work = flops_by_purpose(step, flops).values()
        found.append((sum(w.total for w in work) / share, sum(w.recompute for w in work) / share))
    return found


def assert_speed(folder, world_size):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "time/step" in line]
    work = counted_work(folder, world_size)
    assert len(lines) == len(work) == 2
    for line, (done, repeated) in zip(lines, work, strict=True):
        assert line["perf/tflops_per_gpu"] * 1e12 * line["time/step"] == pytest.approx(done, rel=1e-9)
        assert line["perf/mfu"] * PEAK * 1e12 * line["time/step"] == pytest.approx(done - repeated, rel=1e-9)
        assert 0.05 < line["perf/peak_memory_gib"] < 100
        assert line["perf/samples_per_second"] > 0


def test_an_nft_run_logs_the_flops_of_its_forwards(one_rank, tiny_pipelines, tmp_path):
    one_rank.run(train_on_rank, **tiny_recipe("sd3_nft", tmp_path / "run", tiny_pipelines("sd3"), *COMMON, *RL))
    assert_speed(tmp_path / "run", 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora=null", "engine.deepspeed=zero3", "model.gradient_checkpointing=true"],
        ["engine.deepspeed=zero2", "engine.sequence_parallel=2"],
        ["lora={rank: 4, alpha: 8}", "engine.deepspeed=zero3", "model.gradient_checkpointing=true"],
    ],
    ids=["full zero3", "sequence parallel", "adapters zero3"],
)
@pytest.mark.ci_cases("sequence parallel")
def test_an_sft_run_logs_the_flops_of_one_rank(two_ranks, tiny_pipelines, digits, tmp_path, overrides):
    recipe = tiny_recipe("sd3_sft", tmp_path / "run", tiny_pipelines("sd3"), *COMMON, *overrides, data=digits)
    two_ranks.run(train_on_rank, **recipe)
    assert_speed(tmp_path / "run", 2)
