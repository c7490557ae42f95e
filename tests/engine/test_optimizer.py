"""The optimizer that a denoiser gets on each kind of device, and its states as checkpoints hold them."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from each_case import check_each
from wfm_ds.engine.optimizer import (
    STATE_BLOCK,
    build_optimizer,
    decode_blocks,
    ema_decay,
    encode_blocks,
    learning_rate,
    read_states,
    should_use_fused,
    write_states,
)
from wfm_ds.recipe.sections import OptimizerRecipe

OPTIONS = OptimizerRecipe(lr=0.5, betas=(0.8, 0.9), eps=0.1, weight_decay=0.25)
SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


@check_each(("device", "choice"), [("cuda", True), ("cuda:3", True), ("cpu", None)])
def test_adamw_is_one_kernel_on_a_gpu_and_torchs_choice_on_a_cpu(device, choice):
    assert should_use_fused(torch.device(device)) is choice
    made = build_optimizer(nn.Linear(2, 2), OPTIONS, torch.device(device))
    assert made.defaults["fused"] is choice


def test_adamw_has_the_recipes_options_and_what_trains():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    made = build_optimizer(layer, OPTIONS, torch.device("cpu"))
    assert made.param_groups[0]["params"] == [layer.weight]
    assert {name: made.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 0.1,
        "weight_decay": 0.25,
    }


def code_book():
    """Ascending and without -1, as the library's are: the value of the largest element may not be its block's scale."""
    return torch.cat([torch.linspace(-0.99, 0.0, 128), torch.logspace(-5, 0, 128)])


@pytest.mark.parametrize("count", [STATE_BLOCK, 3 * STATE_BLOCK + 17])
def test_codes_come_back_from_the_numbers_that_they_stand_for(count):
    draw = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
    absmax = torch.rand(-(-count // STATE_BLOCK), generator=draw) * 10.0 ** -torch.arange(-(-count // STATE_BLOCK))
    values, scale = decode_blocks(codes, absmax, code_book())
    again, absmax_again = encode_blocks(values, scale, code_book())
    assert torch.equal(again, codes)
    assert torch.equal(absmax_again, absmax)
    # Ranks that cut the masters otherwise have blocks of elements of two scales: their largest value is the new one.
    moved = encode_blocks(values[100:], scale[100:], code_book())
    near, _ = decode_blocks(*moved, code_book())
    widest = code_book().diff().max() / 2
    assert (near - values[100:]).abs().max() <= widest * absmax.max() + 1e-6
    # What no parameter fills is 0 and has no scale; the others keep theirs.
    values[-5:], scale[-5:] = 0, 0
    assert torch.equal(encode_blocks(values, scale, code_book())[1], absmax)


@pytest.mark.parametrize("count", [4096 + 100, 100])
def test_eight_bit_moments_continue_from_what_a_checkpoint_holds(count):
    """100 elements: the library keeps small tensors as they are."""
    pytest.importorskip("bitsandbytes", reason="AdamW in eight bits is bitsandbytes'")
    options, cpu = OptimizerRecipe(name="adamw8bit", lr=0.01, weight_decay=0.1), torch.device("cpu")
    draw = torch.Generator().manual_seed(count)
    begin = torch.randn(count, generator=draw)
    gradients = torch.randn(6, count, generator=draw)

    class Flat(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.flat = nn.Parameter(values.clone())

    def train(module, optimizer, steps):
        for gradient in gradients[steps]:
            module.flat.grad = gradient.clone()
            optimizer.step()

    whole = Flat(begin)
    optimizer = build_optimizer(whole, options, cpu)
    assert read_states(optimizer, whole.flat) == {}
    train(whole, optimizer, slice(0, 3))
    saved = {name: value.clone() for name, value in read_states(optimizer, whole.flat).items()}
    assert saved.keys() == {"step", "exp_avg", "exp_avg.scale", "exp_avg_sq", "exp_avg_sq.scale"}
    assert {len(value) for name, value in saved.items() if name != "step"} == {count}
    resumed = Flat(whole.flat.detach())
    its_optimizer = build_optimizer(resumed, options, cpu)
    write_states(its_optimizer, resumed.flat, saved)
    train(whole, optimizer, slice(3, 6))
    train(resumed, its_optimizer, slice(3, 6))
    assert torch.equal(resumed.flat, whole.flat)
    exact = Flat(begin.double())
    reference = torch.optim.AdamW(exact.parameters(), lr=0.01, weight_decay=0.1)
    for gradient in gradients:
        exact.flat.grad = gradient.double()
        reference.step()
    moved = (exact.flat - begin.double()).detach()
    assert (whole.flat.double() - exact.flat).norm() < 0.1 * moved.norm()


def rates(total, **keys):
    return [learning_rate(OptimizerRecipe(**keys), update, total) for update in range(1, total + 1)]


@given(schedule=SCHEDULES, total=st.integers(1, 60), warmup=st.integers(0, 80), final=st.floats(0, 1))
def test_rates_rise_to_the_peak_and_fall_to_the_final_share(schedule, total, warmup, final):
    got = rates(total, lr=0.5, schedule=schedule, warmup_steps=warmup, final_lr_fraction=final)
    peak = max(warmup, 1)
    rising, falling = got[:peak], got[peak - 1 :]
    assert rising == pytest.approx([0.5 * update / peak for update in range(1, len(rising) + 1)])
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    if total > peak:
        assert got[-1] == pytest.approx(0.5 if schedule == "constant" else 0.5 * final)


def test_cosine_and_linear_are_half_way_in_the_middle():
    for schedule in ("linear", "cosine"):
        assert rates(9, lr=1.0, schedule=schedule, final_lr_fraction=0.2)[4] == pytest.approx(0.6)
    quarter = rates(9, lr=1.0, schedule="cosine")[2]
    assert quarter == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_updates_past_the_plan_keep_the_final_rate():
    options = OptimizerRecipe(lr=1.0, schedule="linear", final_lr_fraction=0.1)
    assert learning_rate(options, 30, 20) == pytest.approx(0.1)


def test_ema_decay_grows_to_its_bound():
    assert [ema_decay(0.9, j) for j in (1, 2, 1000)] == pytest.approx([2 / 11, 3 / 12, 0.9])
    assert ema_decay(0.9999, 1000) == pytest.approx(1001 / 1010)
