"""Whole runs with sequence parallelism on two ranks equal the same recipes on one rank."""

import contextlib
from unittest import mock

import pytest

from forward_counts import counted, predicted
from multi_rank.resuming import settings, tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_same_runs, records

# AdamW's first steps divide by the gradient's size. A larger eps limits the effect of rounding errors.
COMMON = ["optimizer.eps=1e-4", "optimizer.lr=3e-2", "logging.console=false", "engine.guard=true"]
SHARED = "engine.sequence_parallel=2"
NFT = ["run.steps=4", "algorithm.old_decay={initial: 0.6, slope: 0, max: 0.6}"]


def train_and_count(recipe, overrides):
    """Train on this rank. Return the numbers of files read, batches submitted, and samples decoded and encoded."""
    from wfm_ds.data import batch_reader
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.rollout.rewards import RewardClient
    from wfm_ds.training import validation_frames

    counts = {"read": 0, "submitted": 0, "decoded": 0, "encoded": 0}

    def counting(owner, name, key, size=lambda *_: 1):
        stock = getattr(owner, name)

        def wrapped(*args, **kwargs):
            counts[key] += size(*args)
            return stock(*args, **kwargs)

        return mock.patch.object(owner, name, wrapped)

    patches = [
        counting(batch_reader, "load_media", "read"),
        counting(validation_frames, "load_media", "read"),
        counting(RewardClient, "submit", "submitted"),
        counting(DiffusionModel, "decode_latents", "decoded", lambda _, latents: len(latents)),
        counting(DiffusionModel, "encode_uint8", "encoded", lambda _, media: len(media)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        train_on_rank(recipe, overrides)
    return counts


@pytest.fixture
def both(one_rank, two_ranks, tiny_pipelines, tmp_path):
    """Return a function that trains a recipe on one rank, and on two ranks with sequence parallelism.

    It compares both runs and returns the counts of all three ranks.
    """

    def run(name, *overrides, family="sd3"):
        counts = []
        for ranks, where, shared in ((one_rank, "one", []), (two_ranks, "two", [SHARED])):
            words = [*COMMON, *overrides, *shared]
            counts += ranks.run(train_and_count, **tiny_recipe(name, tmp_path / where, tiny_pipelines(family), *words))
        assert_same_runs(tmp_path / "one", tmp_path / "two")
        return counts

    return run


def assert_done_once(counts, *keys):
    """Assert that the two ranks together do the work of one. They split decoding; the leader does the rest."""
    alone, leader, follower = counts
    for key in keys:
        assert alone[key] == leader[key] + follower[key] > 0
    assert leader["decoded"] > 0
    assert {key for key, count in follower.items() if count} <= {"decoded"}


@pytest.mark.parametrize(
    "engine",
    [
        ["engine.deepspeed=zero2", "lora={rank: 4, alpha: 8}"],
        ["engine.deepspeed=zero3", "lora=null", "model.gradient_checkpointing=true"],
    ],
    ids=["lora zero2", "full zero3"],
)
def test_nft_with_sequence_parallelism_equals_one_rank(engine, both, tmp_path):
    counts = both("sd3_nft", *NFT, *engine)
    assert_done_once(counts, "submitted", "decoded")
    steps = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert len(steps) == 4
    # All policies differ; otherwise equal metrics would prove little.
    assert min(steps[-1][tag] for tag in ("kl/ref", "nft/old_deviation", "nft/old_ref_deviation")) > 1e-5
    assert counted(tmp_path / "one") == counted(tmp_path / "two") == predicted(tmp_path / "two", 2)


@pytest.mark.parametrize(("name", "engine"), [("sd3_flow_grpo", []), ("sd3_mix_grpo", ["lora=null"])])
@pytest.mark.ci_cases("sd3_flow_grpo-engine0")
def test_flow_grpo_with_sequence_parallelism_equals_one_rank(name, engine, both, tmp_path):
    common = ["run.steps=2", "optimizer.lr=3e-3", "algorithm.clip_ratio=0.03", "engine.deepspeed=zero3"]
    counts = both(name, *common, *engine)
    assert_done_once(counts, "submitted", "decoded")
    updates = [r for r in records(tmp_path / "two") if "loss/total" in r]
    assert {r["policy/ratio_max_abs_dev"] for r in updates[::2]} == {0.0}


def test_ddrl_with_sequence_parallelism_equals_one_rank(both, broken_digits, tmp_path):
    counts = both(
        "sd3_ddrl",
        f"data.path={broken_digits}",
        "data.shuffle=false",  # the third image is corrupt
        "run.steps=3",
        "engine.micro_batch_size=2",
        "algorithm.data_beta=0.5",
        "algorithm.kl_beta=0.1",
    )
    assert_done_once(counts, "submitted", "decoded", "read", "encoded")
    assert [r["data/bad/decode"] for r in records(tmp_path / "two") if "loss/total" in r][-1] == 1


def test_sft_with_sequence_parallelism_equals_one_rank_and_reads_every_sample_once(both, broken_digits, tmp_path):
    counts = both(
        "sd3_sft",
        f"data.path={broken_digits}",
        "run.steps=2",
        "data.shuffle=false",
        "engine.gradient_accumulation=2",
        "validation.num_images=3",
        "validation.holdout=0.01",
    )
    assert_done_once(counts, "decoded", "read", "encoded")
    assert [r["data/bad/decode"] for r in records(tmp_path / "two") if "sft/loss" in r][-1] == 1


@pytest.mark.parametrize("family", ["wan22", "moving"])  # a model with two experts, and one with three heads
@pytest.mark.ci_cases("moving")
def test_videos_with_sequence_parallelism_equal_one_rank(family, both):
    counts = both(
        "sd3_nft",
        *("run.steps=2", "engine.micro_batch_size=3"),
        *("sampling.num_frames=5", "sampling.steps=6", "lora={rank: 4, alpha: 8}"),
        family=family,
    )
    assert_done_once(counts, "submitted", "decoded")


@pytest.mark.parametrize("case", ["sft lora zero2", "nft full zero3"])
@pytest.mark.ci_cases("sft lora zero2")
def test_a_run_resumes_with_or_without_sequence_parallelism(
    case, one_rank, two_ranks, tiny_pipelines, broken_digits, tmp_path
):
    """Train on a replica of two ranks, resume on one rank, then resume on two ranks."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sources = {"model": tiny_pipelines("sd3"), "digits": broken_digits.parent}
    smooth = ["optimizer.eps=1e-4", "model.dtype=float32"]
    two_ranks.run(train_on_rank, **settings(case, whole, **sources, changes=[*smooth, SHARED]))
    two_ranks.run(train_on_rank, **settings(case, parts, **sources, changes=[*smooth, SHARED]), stop_at=1)
    one_rank.run(train_on_rank, **settings(case, parts, **sources, changes=smooth), stop_at=2)
    two_ranks.run(train_on_rank, **settings(case, parts, **sources, changes=[*smooth, SHARED]))
    assert_same_runs(whole, parts)
