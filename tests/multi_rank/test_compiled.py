"""Compiled blocks under DeepSpeed: training equals eager training, and a whole run compiles few graphs."""

import copy

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_same_runs, records
from multi_rank.sharing import CASES, built, difference, run
from multi_rank.training import EVERYTHING, MICRO_STEPS, TARGETS, small_recipe, small_sd3, train_step, write_zero3
from wfm_ds.ulysses.install import install_ulysses

pytestmark = pytest.mark.slow
BLOCKS = "diffusers.models.attention.JointTransformerBlock"
# Two kinds of blocks. Each is compiled with gradients (the input of the first block requires none), without gradients,
# for the EMA, and without adapters. All batches of these runs have one size; a second size would double the number.
MOST_GRAPHS_OF_A_RUN = 10


def steps_on_rank(config, compiled, lora, checkpointing):
    """Return losses and norms of two optimizer steps that also use old and reference predictions."""
    import torch
    from diffusers.models.attention import JointTransformerBlock
    from torch._dynamo.utils import counters

    from wfm_ds.distributed.world import World
    from wfm_ds.engine.engine import DenoiserEngine

    torch._dynamo.reset()
    counters.clear()
    engine = DenoiserEngine.build(
        small_sd3(),
        small_recipe(config, lora=lora, model={"gradient_checkpointing": checkpointing}, engine={"compile": compiled}),
        World.join(),
        lora_targets=TARGETS,
        policies=EVERYTHING,
        accumulation=MICRO_STEPS,
        total_updates=4,
        block_classes=(JointTransformerBlock,),
    )
    rows = []
    for step in range(2):
        result, loss = train_step(engine, step)
        rows.append([loss, result.grad_norm])
    return {"rows": rows, "graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


# Gathers the parameters of a whole block at a time, also the small ones.
LEAVES = {"stage3_param_persistence_threshold": 0, "leaf_module": {"classes": [BLOCKS]}}


@pytest.mark.parametrize(
    ("config", "lora", "checkpointing"),
    [
        ("zero1", False, False),
        ("zero2", True, True),
        ("zero3, leaves", False, True),
    ],
)
@pytest.mark.long
def test_training_of_two_ranks_equals_the_eager_one(config, lora, checkpointing, two_ranks, tmp_path):
    source = write_zero3(tmp_path, **LEAVES) if config == "zero3, leaves" else config
    settings = {"config": source, "lora": lora, "checkpointing": checkpointing}
    eager = two_ranks.run(steps_on_rank, compiled=False, **settings)
    compiled = two_ranks.run(steps_on_rank, compiled=True, **settings)
    for got, want in zip(compiled, eager, strict=True):
        for row, want_row in zip(got["rows"], want["rows"], strict=True):
            assert row == pytest.approx(want_row, rel=1e-5)
        assert want["graphs"] == 0 < got["graphs"] <= 12
        assert got["breaks"] == 0


def sharing_on_rank(name, size):
    """Compare compiled blocks under sequence parallelism with eager blocks in one process."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from wfm_ds.engine.block_compilation import compile_blocks
    from wfm_ds.models.registry import model_families

    torch._dynamo.reset()
    counters.clear()
    case = CASES[name]
    whole = built(case, heads=5, lora=True, checkpointing=True)
    shared = copy.deepcopy(whole)
    install_ulysses(shared, dist.group.WORLD)
    compile_blocks(shared, model_families()[name.split(",")[0]].block_classes)
    found = difference(run(shared, case, [size]), run(whole, case, [size]))
    return {**found, "breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}


FAMILIES = ("sd3", "wan, times of tokens", "cosmos25", "sana", "sana_video, times of tokens")


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_exchanges_between_ranks_are_compiled_with_their_gradients(name, two_ranks):
    """Ranks have unequal numbers of tokens and heads."""
    for found in two_ranks.run(sharing_on_rank, name=name, size=CASES[name].sizes[0]):
        assert found["forward"] <= 1e-5
        assert found["gradient"] <= 2e-5
        assert found["breaks"] == 0
        assert found["graphs"] <= 4


def run_on_rank(recipe, overrides):
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    train_on_rank(recipe, overrides)
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


@pytest.fixture
def runs(tiny_pipelines, tmp_path):
    """Return a function that trains a tiny recipe eager and compiled, and compares both runs.

    It returns rank 0's counts of graphs and graph breaks, and the metrics of the compiled run.
    """

    def run(ranks, name, *overrides):
        counts = {}
        for compiled in ("false", "true"):
            words = ["logging.console=false", "optimizer.eps=1e-4", f"engine.compile={compiled}", *overrides]
            recipe = tiny_recipe(name, tmp_path / compiled, tiny_pipelines("sd3"), *words)
            counts[compiled], *_ = ranks.run(run_on_rank, **recipe)
        assert counts["false"]["graphs"] == 0
        assert_same_runs(tmp_path / "false", tmp_path / "true")
        return counts["true"], records(tmp_path / "true")

    return run


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sd3_flow_grpo", ["algorithm.old_log_prob=rollout", "algorithm.updates_per_rollout=1"]),
        ("sd3_nft", ["model.gradient_checkpointing=true"]),
    ],
)
@pytest.mark.long
def test_a_compiled_run_has_few_graphs_and_equals_the_eager_run(name, overrides, one_rank, runs):
    counts, lines = runs(one_rank, name, *overrides)
    assert counts["breaks"] == 0
    assert counts["graphs"] <= MOST_GRAPHS_OF_A_RUN
    first = next(line for line in lines if line.get("step") == 1)
    if name == "sd3_flow_grpo":  # the trained policy is still the one that generated the samples
        assert first["policy/ratio_max_abs_dev"] == 0
    else:
        assert first["nft/old_deviation"] == 0


@pytest.mark.long
def test_compiled_sequence_parallelism_equals_eager_training(two_ranks, runs):
    counts, _ = runs(two_ranks, "sd3_nft", "engine.sequence_parallel=2")
    assert counts["breaks"] == 0
    assert counts["graphs"] <= MOST_GRAPHS_OF_A_RUN
