"""The optimizer on CPUs and GPUs, and its states in checkpoints."""

import pytest
import torch
from diffusers.optimization import get_scheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from each_case import check_each
from wfm_ds.engine.optimizer import (
    STATE_BLOCK,
    ExtraAdapter,
    build_optimizer,
    decode_blocks,
    encode_blocks,
    read_states,
    should_use_fused,
    write_states,
)
from wfm_ds.engine.optimizer_steps import ema_decay, learning_rate
from wfm_ds.recipe.sections import OptimizerRecipe

OPTIONS = OptimizerRecipe(lr=0.5, betas=(0.8, 0.9), eps=0.1, weight_decay=0.25)
SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


@check_each(("device", "choice"), [("cuda", True), ("cuda:3", True), ("cpu", None)])
def test_adamw_is_one_kernel_on_a_gpu_and_torchs_choice_on_a_cpu(device, choice):
    assert should_use_fused(torch.device(device)) is choice
    made = build_optimizer(nn.Linear(2, 2), OPTIONS, torch.device(device))
    assert made.defaults["fused"] is choice


def test_adamw_has_the_recipes_options_and_the_trained_parameters():
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


class TwoAdapters(nn.Module):
    """Weights named like those of two adapters."""

    def __init__(self, count):
        super().__init__()
        draw = torch.Generator().manual_seed(count)
        names = ("default", "fake")
        self.lora_A = nn.ModuleDict({n: nn.Linear(count, 1, bias=False) for n in names})
        for layer in self.lora_A.values():
            layer.weight.data = torch.randn(1, count, generator=draw)

    def spoil_gradients(self, draw):
        """Set a gradient also for the adapter that is not trained."""
        for layer in self.lora_A.values():
            layer.weight.grad = torch.randn(layer.weight.shape, generator=draw)


def assert_steps_change_one_adapter(options, count):
    """Compare alternating steps with one optimizer per adapter."""
    cpu, fake = torch.device("cpu"), ExtraAdapter(lr=0.02, betas=(0.0, 0.9))
    fake_options = fake.optimizer_options(options)
    module, alone = TwoAdapters(count), TwoAdapters(count)
    optimizer = build_optimizer(module, options, cpu, {"fake": fake_options})
    separate = {
        name: build_optimizer(alone.lora_A[name], own, cpu)
        for name, own in (("default", options), ("fake", fake_options))
    }
    draw = torch.Generator().manual_seed(1)
    for adapter in ("fake", "fake", "default", "fake", "default"):
        module.spoil_gradients(draw)
        idle = module.lora_A["default" if adapter == "fake" else "fake"].weight
        state = {name: value.clone() for name, value in read_states(optimizer, idle).items()}
        optimizer.active_adapter = adapter
        optimizer.step()
        assert all(torch.equal(state[name], value) for name, value in read_states(optimizer, idle).items())
        alone.lora_A[adapter].weight.grad = module.lora_A[adapter].weight.grad.clone()
        separate[adapter].step()
        for name, layer in module.lora_A.items():
            assert torch.equal(layer.weight, alone.lora_A[name].weight)
    assert [learning_rate(fake_options, update, 9) for update in (1, 2, 3)] == [0.02, 0.02, 0.02]


def test_a_step_changes_only_the_active_adapter():
    assert_steps_change_one_adapter(OPTIONS.model_copy(update={"schedule": "cosine"}), 10)


def test_a_step_in_eight_bits_changes_only_the_active_adapter():
    pytest.importorskip("bitsandbytes", reason="AdamW in eight bits is bitsandbytes'")
    assert_steps_change_one_adapter(OptimizerRecipe(name="adamw8bit", lr=0.01, weight_decay=0.1), 4096 + 100)


def code_book():
    """Return an ascending code book without -1, like bitsandbytes' own: the largest element may not be the scale of its
    block."""
    return torch.cat([torch.linspace(-0.99, 0.0, 128), torch.logspace(-5, 0, 128)])


@pytest.mark.parametrize("count", [STATE_BLOCK, 3 * STATE_BLOCK + 17])
def test_encoding_decoded_values_returns_the_same_codes(count):
    draw = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
    absmax = torch.rand(-(-count // STATE_BLOCK), generator=draw) * 10.0 ** -torch.arange(-(-count // STATE_BLOCK))
    values, scale = decode_blocks(codes, absmax, code_book())
    again, absmax_again = encode_blocks(values, scale, code_book())
    assert torch.equal(again, codes)
    assert torch.equal(absmax_again, absmax)
    # With other shards a block can mix elements of two scales; its new scale is their largest value.
    moved = encode_blocks(values[100:], scale[100:], code_book())
    near, _ = decode_blocks(*moved, code_book())
    widest = code_book().diff().max() / 2
    assert (near - values[100:]).abs().max() <= widest * absmax.max() + 1e-6
    # Padding is 0 and has no scale; other blocks keep their scale.
    values[-5:], scale[-5:] = 0, 0
    assert torch.equal(encode_blocks(values, scale, code_book())[1], absmax)


@pytest.mark.parametrize("count", [4096 + 100, 100])
def test_eight_bit_moments_resume_from_a_checkpoint(count):
    """bitsandbytes does not quantize small tensors such as one of 100 elements."""
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


@given(schedule=SCHEDULES, total=st.integers(1, 60), warmup=st.integers(0, 80), final=st.floats(0, 1))
def test_rates_equal_the_schedulers_of_diffusers_above_the_final_fraction(schedule, total, warmup, final):
    options = OptimizerRecipe(lr=0.5, schedule=schedule, warmup_steps=warmup, final_lr_fraction=final)
    adamw = torch.optim.AdamW([torch.zeros(1)], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    factors = get_scheduler(name, adamw, num_warmup_steps=warmup, num_training_steps=total).lr_lambdas[0]
    for update in range(1, total + 1):
        factor = factors(update - 1)
        if schedule != "constant" and update > warmup:
            factor = final + (1 - final) * factor
        assert learning_rate(options, update, total) == pytest.approx(0.5 * factor, abs=1e-12)


def test_updates_after_the_last_step_use_the_final_rate():
    options = OptimizerRecipe(lr=1.0, schedule="linear", final_lr_fraction=0.1)
    assert learning_rate(options, 30, 20) == pytest.approx(0.1)


def test_ema_decay_grows_to_its_bound():
    assert [ema_decay(0.9, j) for j in (1, 2, 1000)] == pytest.approx([2 / 11, 3 / 12, 0.9])
    assert ema_decay(0.9999, 1000) == pytest.approx(1001 / 1010)
