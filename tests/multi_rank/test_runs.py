"""Whole runs with rollouts and rewards on two ranks get the same result as the same recipe on one rank."""

import json
from pathlib import Path

import av
import numpy as np
import pytest

from forward_counts import counted, predicted
from multi_rank.same_runs import assert_same_runs, records

ROOT = Path(__file__).parent.parent.parent
# AdamW's first steps divide by the gradient's size. A larger eps limits the effect of rounding errors.
COMMON = ["optimizer.eps=1e-4", "optimizer.lr=3e-2", "run.steps=3", "logging.console=false"]
OLD = "algorithm.old_decay={initial: 0.6, slope: 0, max: 0.6}"  # makes the old policy differ from the trained policy
NFT = {
    "lora zero2": ["engine.deepspeed=zero2", "lora={rank: 4, alpha: 8}"],
    "lora zero3": ["engine.deepspeed=zero3", "lora={rank: 4, alpha: 8}"],
    "lora fp8 zero3": ["engine.deepspeed=zero3", "lora={rank: 4, alpha: 8}", "model.base_precision=fp8"],
    "full zero2": ["engine.deepspeed=zero2", "lora=null"],
    "full zero3": ["engine.deepspeed=zero3", "lora=null"],
}
GRPO = {
    "lora, reference, guidance": ("sd3_flow_grpo", []),
    "window, recomputed": ("sd3_flow_grpo_fast", ["algorithm.old_log_prob=recompute", "engine.max_forward_batch=3"]),
    "moving window, guard, full zero3": (
        "sd3_mix_grpo",
        ["algorithm.guard=true", "algorithm.guard_reweight=false", "lora=null", "engine.deepspeed=zero3"],
    ),
    "same noise, best and worst, shares": ("sd3_dance_grpo", ["engine.deepspeed=zero2"]),
    "base in float8": ("sd3_flow_grpo", ["model.base_precision=fp8"]),
    "divergence": ("sd3_flow_dppo", ["algorithm.divergence=1e-6"]),
    "divergence, guard, full zero3": (
        "sd3_flow_dppo",
        ["algorithm.divergence=1e-6", "algorithm.guard=true", "lora=null", "engine.deepspeed=zero3"],
    ),
}
NOISED = {
    "awm, lora zero2": ("sd3_awm", NFT["lora zero2"]),
    "awm, clipped, full zero3": ("sd3_awm", [*NFT["full zero3"], "algorithm.clip_ratio=1e-3"]),
    "ram, lora zero3": ("sd3_ram", NFT["lora zero3"]),
    "ram, exponential tilt, full zero2": (
        "sd3_ram",
        [*NFT["full zero2"], "algorithm.tilt=exp", "algorithm.multiplier=0.5", "algorithm.updates_per_rollout=2"],
    ),
}


@pytest.fixture
def both(train_tiny):
    """Return a function that trains a tiny recipe on one rank into tmp_path/one, and on two into tmp_path/two.

    It asserts that both runs are the same. If all samples train, it also compares the forwards of each step with the
    prediction.
    """

    def run(name, *overrides, all_train=True):
        one, two = (train_tiny(where, name, *COMMON, *overrides, ranks=n) for n, where in ((1, "one"), (2, "two")))
        assert not all_train or (counted(one), counted(two)) == (predicted(one, 1), predicted(two, 2))
        assert_same_runs(one, two)

    return run


@pytest.mark.unit
@pytest.mark.parametrize("case", [c if c == "full zero3" else pytest.param(c, marks=pytest.mark.slow) for c in NFT])
@pytest.mark.ci_cases("full zero3", "lora zero2")
def test_nft_on_two_ranks_equals_nft_on_one(case, both, tmp_path):
    both("sd3_nft", "engine.guard=true", OLD, *NFT[case])
    steps = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert steps[0]["nft/old_deviation"] == 0.0  # equal policies give bitwise equal predictions
    # All policies differ; otherwise equal metrics would prove little.
    assert min(steps[-1][tag] for tag in ("kl/ref", "nft/old_deviation", "nft/old_ref_deviation")) > 1e-5


@pytest.mark.unit
@pytest.mark.parametrize("case", [c if i < 1 else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(GRPO)])
@pytest.mark.ci_cases("lora, reference, guidance", "divergence, guard, full zero3")
def test_flow_grpo_on_two_ranks_equals_flow_grpo_on_one(case, both, tmp_path):
    name, overrides = GRPO[case]
    bound = [] if name == "sd3_flow_dppo" else ["algorithm.clip_ratio=0.03"]
    both(name, "engine.guard=true", "optimizer.lr=3e-3", *bound, *overrides, all_train=name != "sd3_dance_grpo")
    updates = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert [r["step"] for r in updates] == [1, 2, 3, 4, 5, 6]
    first, later = updates[::2], updates[1::2]
    assert {r["policy/ratio_max_abs_dev"] for r in first} == {0.0}
    assert max(r["policy/ratio_start_abs_dev"] for r in first) < 1e-6
    assert min(r["policy/ratio_max_abs_dev"] for r in later) > 1e-5
    if name == "sd3_flow_dppo":
        assert max(r["policy/divergence_start"] for r in first) < 1e-12
        assert max(r["policy/clip_fraction_active"] for r in later) > 0


@pytest.mark.parametrize("case", NOISED)
@pytest.mark.ci_cases("awm, clipped, full zero3")
def test_other_losses_on_noised_rollouts_are_the_same_on_two_ranks(case, both, tmp_path):
    name, overrides = NOISED[case]
    both(name, "engine.guard=true", "optimizer.lr=3e-3", *overrides)
    steps = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert steps[-1]["kl/ref"] > 1e-6
    if name == "sd3_awm":
        assert steps[-1]["kl/ema"] > 1e-8
        assert {r["policy/ratio_max_abs_dev"] for r in steps[::2]} == {0.0}
        assert min(r["policy/ratio_max_abs_dev"] for r in steps[1::2]) > 1e-5


def test_each_expert_has_equally_many_micro_batches_on_all_ranks(both, tiny_pipelines):
    # Each sample trains on three of six noise levels, so ranks have unequal numbers of loss terms per expert.
    both(
        "sd3_nft",
        "engine.guard=true",
        f"model.path={tiny_pipelines('wan22')}",
        "sampling.num_frames=5",
        "sampling.steps=6",
        "engine.micro_batch_size=3",
        "lora={rank: 4, alpha: 8}",
        OLD,
        all_train=False,
    )


def test_several_updates_and_guidance_are_equal_on_two_ranks(both, tmp_path):
    both(
        "sd3_nft",
        "algorithm.updates_per_rollout=2",
        "sampling.guidance_scale=2.5",
        "engine.micro_batch_size=3",
        "engine.max_forward_batch=3",
        "checkpoint.export_every=2",
    )
    assert [r["step"] for r in records(tmp_path / "one") if "loss/total" in r] == [1, 2, 3, 4, 5, 6]
    assert sorted(f.name for f in (tmp_path / "one" / "safetensors").iterdir()) == ["step_2", "step_3"]


def test_validation_videos_can_be_regenerated_from_the_export(both, tiny_pipelines, tmp_path):
    both(
        "sd3_nft",
        f"model.path={tiny_pipelines('wan21')}",
        "sampling.num_frames=5",
        "sampling.fps=8",
        "sampling.guidance_scale=2.5",
        "reward.functions=[{name: motion}, {name: color, options: {frames: 'uniform:2'}}]",
        "sampling.eval_steps=2",
        "validation.at_start=false",
        "engine.max_forward_batch=4",
    )
    one, two = (tmp_path / name / "samples" / "step_3" for name in ("one", "two"))
    rows = [json.loads(line) for line in (two / "samples.jsonl").read_text().splitlines()]
    assert all(row["fps"] == 8.0 and row["rewards"]["motion"] > 0 and row["rewards"]["color"] > 0 for row in rows)
    for row in rows:
        assert frames_of(two / row["file"]).shape == (5, 32, 32, 3)
        assert np.abs(frames_of(two / row["file"]) - frames_of(one / row["file"])).mean() < 1
    drawn = drawn_again(tmp_path / "one", tmp_path / "drawn", tiny_pipelines("wan21"))
    assert drawn == {(row["prompt"], row["seed"]): (one / row["file"]).read_bytes() for row in rows}


def frames_of(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(int)


def drawn_again(run, out, base):
    """Regenerate the validation videos with `wfm generate`. Return the files by prompt and seed."""
    from commands import wfm_command

    prompts = ROOT / "recipes" / "prompts" / "colors" / "train.txt"
    first = out.with_suffix(".txt")  # the validation prompts
    first.write_text("".join(prompts.read_text().splitlines(keepends=True)[:4]))
    sampling = ["--steps", "2", "--guidance", "2.5", "--frames", "5", "--fps", "8", "--height", "32", "--width", "32"]
    for seed in ("1000001", "1000002"):  # validation also generates all prompts of a seed as one batch
        lora = run / "safetensors" / "step_3" / "lora"
        where = ["--model", str(base), "--lora", str(lora), "--prompts", str(first), "--out", str(out / seed)]
        assert wfm_command("generate")([*where, *sampling, "--seeds", seed, "--batch", "4"]) == 0
    found = [(f.parent, json.loads(line)) for f in out.glob("*/samples.jsonl") for line in f.read_text().splitlines()]
    return {(row["prompt"], row["seed"]): (folder / row["file"]).read_bytes() for folder, row in found}


@pytest.mark.unit
@pytest.mark.parametrize("scratch", ["pretrained", pytest.param("random", marks=pytest.mark.slow)])
def test_sft_does_not_depend_on_how_the_global_batch_is_cut(scratch, train_tiny, digits, tmp_path):
    cuts = {  # 12 images per optimizer step
        "one": ["engine.micro_batch_size=4", "engine.gradient_accumulation=3"],
        "two": ["engine.micro_batch_size=3", "engine.gradient_accumulation=2"],
    }
    words = [f"model.denoiser_init={scratch}", "algorithm.stratified=true", "validation.holdout=0.01"]
    words += ["validation.num_images=5", "logging.sample_every=1", *COMMON]
    for num_ranks, (name, cut) in enumerate(cuts.items(), 1):
        train_tiny(name, "sd3_sft", *words, *cut, ranks=num_ranks, data=digits)
    assert sorted(f.name for f in (tmp_path / "two" / "samples").iterdir()) == [f"step_{n}" for n in range(4)]
    assert_same_runs(tmp_path / "one", tmp_path / "two")


def test_broken_images_are_skipped_and_counted_alike_on_any_number_of_ranks(train_tiny, broken_digits, tmp_path):
    words = [
        *("validation.at_start=false", "validation.every=0", "validation.num_images=2"),
        "run.steps=3",  # 900 samples, so that every image is read at least one time
        *("sampling.eval_steps=1", "logging.console=false"),
    ]
    for num_ranks, name, micro in ((1, "one", 150), (2, "two", 75)):
        batch = f"engine.micro_batch_size={micro}"
        train_tiny(name, "sd3_sft", *words, batch, ranks=num_ranks, data=broken_digits)
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert [r["data/bad/decode"] for r in records(tmp_path / "two") if "sft/loss" in r][-1] >= 2


def test_ddrl_on_two_ranks_equals_ddrl_on_one(train_tiny, broken_digits, tmp_path):
    words = [
        "data.shuffle=false",  # the third image is corrupt
        *("engine.guard=true", "engine.micro_batch_size=2"),
        *("rollout.prompts_per_step=3", "rollout.group_size=2"),  # the second group is split across both ranks
        *("algorithm.data_beta=0.5", "algorithm.data_on_first_only=true"),
        *("algorithm.kl_beta=0.1", "algorithm.update_ref_every=2"),
        *("validation.at_start=false", *COMMON),
    ]
    for num_ranks, name in enumerate(("one", "two"), 1):
        train_tiny(name, "sd3_ddrl", *words, ranks=num_ranks, data=broken_digits)
    steps = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert steps[0]["loss/kl"] < 1e-12 < 1e-6 < steps[1]["loss/kl"]  # the reference is the initial model
    assert steps[2]["loss/kl"] == 0  # the reference was updated to the weights of the second step
    assert [r["data/bad/decode"] for r in steps] == [1, 1, 1]
    assert_same_runs(tmp_path / "one", tmp_path / "two")
