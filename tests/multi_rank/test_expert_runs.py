"""Whole runs of a model with two experts, full and LoRA: two ranks against one, resumed against uninterrupted."""

import pytest

from multi_rank import resuming
from multi_rank.same_runs import assert_bitwise_equal, assert_same_runs, exported

pytestmark = pytest.mark.slow

STEPS = 4
# AdamW's first steps divide by the gradient's size. A larger eps limits the effect of rounding errors.
COMMON = ["optimizer.lr=1e-2", "optimizer.eps=1e-4", f"run.steps={STEPS}", "logging.console=false", "engine.guard=true"]
SFT = ["validation.num_images=2", "validation.every=0", "validation.num_prompts=2", "sampling.num_frames=1"]
FULL = ["lora=null", "engine.deepspeed=zero3"]
PARTS = {"lora": ("model.safetensors", "model_2.safetensors"), "full": ("transformer", "transformer_2")}


@pytest.fixture
def train(train_tiny, digits):
    """Return a function that trains a tiny recipe with two experts into tmp_path/name."""

    def run(where, name, *overrides, **options):
        data = {} if name == "wan_nft" else {"data": digits}
        return train_tiny(where, name, *COMMON, *overrides, family="wan22", **data, **options)

    return run


def moved(folder, kind):
    """Return the largest absolute weight of each expert (with LoRA, of its lora_B tensors, which start at 0)."""
    largest = {part: 0.0 for part in PARTS[kind]}
    for name, tensor in exported(folder).items():
        if kind == "full" or "lora_B" in name:
            part = next(p for p in PARTS[kind] if name.startswith((f"{p}/", f"lora/{p} ")))
            largest[part] = max(largest[part], float(tensor.abs().max()))
    return largest


def test_sft_of_two_experts_on_two_ranks_equals_one_rank(train):
    """With one micro-batch per optimizer step, the expert depends only on the step, not on how the batch is split."""
    cut = ["engine.gradient_accumulation=1", "run.seed=11", *SFT]  # this seed trains experts 1, 0, 0, 1
    one = train("one", "wan22_sft_lora", "engine.micro_batch_size=4", *cut)
    two = train("two", "wan22_sft_lora", "engine.micro_batch_size=2", *cut, ranks=2)
    assert all(largest > 1e-3 for largest in moved(one, "lora").values())
    assert_same_runs(one, two)


def test_nft_of_two_experts_on_two_ranks_equals_one_rank(train):
    """Each sample trains on different noise levels, so ranks have unequal numbers of loss terms per expert."""
    cut = ["engine.micro_batch_size=3", "engine.max_forward_batch=3", "algorithm.kl_beta=0.1", "ema=null"]
    one = train("one", "wan_nft", "sampling.guidance_scale_low=2", *cut)
    two = train("two", "wan_nft", "sampling.guidance_scale_low=2", *cut, ranks=2)
    assert all(largest > 1e-3 for largest in moved(one, "lora").values())
    assert_same_runs(one, two)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.ci_cases("lora")
def test_a_resumed_run_of_two_experts_equals_an_uninterrupted_run(train, kind):
    changes = [*SFT, *(FULL if kind == "full" else [])]
    whole = train("whole", "wan22_sft_lora", *changes, ranks=2)
    train("parts", "wan22_sft_lora", *changes, ranks=2, stop_at=2)
    parts = train("parts", "wan22_sft_lora", *changes, ranks=2)
    assert resuming.records(parts) == resuming.records(whole)  # with the counts of forward passes
    assert_bitwise_equal(parts, whole)
    assert {name.split()[0].split("/")[-1 if kind == "lora" else 0] for name in exported(parts)} == set(PARTS[kind])
