"""Whole runs on two ranks that share the tokens of every sample, against the same recipes on one rank."""

from pathlib import Path

import pytest

from forward_counts import counted, predicted
from multi_rank.resuming import settings, train_on_rank
from multi_rank.same_runs import assert_same_runs, records

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "tests" / "recipes"
# AdamW's first steps divide by the gradient's size: a larger eps keeps rounding errors of tiny gradients small.
COMMON = ["optimizer.eps=1e-4", "optimizer.lr=3e-2", "logging.console=false", "engine.guard=true"]
SHARED = "engine.sequence_parallel=2"
NFT = ["run.steps=4", "algorithm.old_decay={initial: 0.6, slope: 0, max: 0.6}"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """With broken images, which have substitutes."""
    from wfm_ds.demos.digits_data import write_digits

    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    for name in ("0003", "0200", "0650"):
        (folder / "images" / f"{name}.png").write_bytes(b"not a picture")
    return folder / "images"


def train_and_count(recipe, overrides):
    """One rank's part of a run, and how many files it read, batches it submitted and samples it decoded."""
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

        setattr(owner, name, wrapped)
        return lambda: setattr(owner, name, stock)

    undo = [
        counting(batch_reader, "load_media", "read"),
        counting(validation_frames, "load_media", "read"),
        counting(RewardClient, "submit", "submitted"),
        counting(DiffusionModel, "decode_latents", "decoded", lambda _, latents: len(latents)),
        counting(DiffusionModel, "encode_uint8", "encoded", lambda _, media: len(media)),
    ]
    try:
        train_on_rank(recipe, overrides)
    finally:
        for restore in undo:
            restore()
    return counts


@pytest.fixture
def both(one_rank, two_ranks, tiny_pipelines, tmp_path):
    """Runs a recipe on one rank into tmp_path/one and on two that share tokens into tmp_path/two; the counts of all
    three ranks."""

    def run(name, *overrides, family="sd3"):
        counts = []
        for ranks, where, shared in ((one_rank, "one", []), (two_ranks, "two", [SHARED])):
            words = [f"run.output_dir={tmp_path / where}", f"model.path={tiny_pipelines(family)}"]
            words += [*COMMON, *overrides, *shared]
            counts += ranks.run(train_and_count, recipe=str(RECIPES / f"{name}.yaml"), overrides=words)
        assert_same_runs(tmp_path / "one", tmp_path / "two")
        return counts

    return run


def assert_done_once(counts, *keys):
    """The leader does all but decoding, which the ranks of a replica share."""
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
def test_nft_with_shared_tokens_is_nft(engine, both, tmp_path):
    counts = both("sd3_nft", f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}", *NFT, *engine)
    assert_done_once(counts, "submitted", "decoded")
    steps = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert len(steps) == 4
    # All policies differ, so that equality says something.
    assert min(steps[-1][tag] for tag in ("kl/ref", "nft/old_deviation", "nft/old_ref_deviation")) > 1e-5
    assert counted(tmp_path / "one") == counted(tmp_path / "two") == predicted(tmp_path / "two", 2)


@pytest.mark.parametrize(("name", "engine"), [("sd3_flow_grpo", []), ("sd3_mix_grpo", ["lora=null"])])
def test_flow_grpo_with_shared_tokens_is_flow_grpo(name, engine, both, tmp_path):
    common = ["run.steps=2", "optimizer.lr=3e-3", "algorithm.clip_ratio=0.03", "engine.deepspeed=zero3"]
    counts = both(name, f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}", *common, *engine)
    assert_done_once(counts, "submitted", "decoded")
    updates = [r for r in records(tmp_path / "two") if "loss/total" in r]
    assert {r["policy/ratio_max_abs_dev"] for r in updates[::2]} == {0.0}


def test_ddrl_with_shared_tokens_is_ddrl(both, digits, tmp_path):
    counts = both(
        "sd3_ddrl",
        f"data.path={digits}",
        "data.shuffle=false",  # the third image of the data is broken
        "run.steps=3",
        "engine.micro_batch_size=2",
        "algorithm.data_beta=0.5",
        "algorithm.kl_beta=0.1",
    )
    assert_done_once(counts, "submitted", "decoded", "read", "encoded")
    assert [r["data/bad/decode"] for r in records(tmp_path / "two") if "loss/total" in r][-1] == 1


def test_sft_with_shared_tokens_is_sft_and_reads_every_sample_once(both, digits, tmp_path):
    counts = both(
        "sd3_sft",
        f"data.path={digits}",
        "run.steps=2",
        "data.shuffle=false",
        "engine.gradient_accumulation=2",
        "validation.num_images=3",
        "validation.holdout=0.01",
    )
    assert_done_once(counts, "decoded", "read", "encoded")
    assert [r["data/bad/decode"] for r in records(tmp_path / "two") if "sft/loss" in r][-1] == 1


@pytest.mark.parametrize("family", ["wan22", "moving"])  # two experts; three heads
def test_videos_with_shared_tokens(family, both):
    counts = both(
        "sd3_nft",
        *(f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}", "run.steps=2", "engine.micro_batch_size=3"),
        *("sampling.num_frames=5", "sampling.steps=6", "lora={rank: 4, alpha: 8}"),
        family=family,
    )
    assert_done_once(counts, "submitted", "decoded")


@pytest.mark.parametrize("case", ["sft lora zero2", "nft full zero3"])
def test_a_run_goes_on_with_tokens_shared_or_whole(case, one_rank, two_ranks, tiny_pipelines, digits, tmp_path):
    """Two ranks of one replica, then one rank, then two again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sources = {"model": tiny_pipelines("sd3"), "digits": digits.parent}
    smooth = ["optimizer.eps=1e-4", "model.dtype=float32"]
    two_ranks.run(train_on_rank, **settings(case, whole, **sources, changes=[*smooth, SHARED]))
    two_ranks.run(train_on_rank, **settings(case, parts, **sources, changes=[*smooth, SHARED]), stop_at=1)
    one_rank.run(train_on_rank, **settings(case, parts, **sources, changes=smooth), stop_at=2)
    two_ranks.run(train_on_rank, **settings(case, parts, **sources, changes=[*smooth, SHARED]))
    assert_same_runs(whole, parts)
