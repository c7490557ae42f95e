"""model.gradient_checkpointing: attention keeps the outputs of attention between tokens and changes no gradient."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from families import CASES, each_family
from wfm_ds.contract.denoiser_checks import add_random_adapter, compute_gradients
from wfm_ds.contract.family_under_test import FamilyUnderTest
from wfm_ds.engine.checkpointing import ATTENTION_OPERATORS, checkpoint_except_attention
from wfm_ds.engine.live_bytes import LiveByteCounter, emulate_gpu_attention


class AttentionRecorder(TorchDispatchMode):
    """Records (number of queries, number of keys) of each call of a fused attention operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ATTENTION_OPERATORS:
            self.calls.append((args[0].shape[-2], args[1].shape[-2]))
        return func(*args, **(kwargs or {}))


def record_attention(subject, model, setting):
    """Return (gradients, calls of attention in the forward and backward pass)."""
    with AttentionRecorder() as recorder:
        gradients = compute_gradients(subject, model, checkpointing=setting)
    return gradients, recorder.calls


@each_family()
def test_no_self_attention_is_recomputed_and_gradients_are_bit_equal(tiny_pipelines, monkeypatch, family):
    subject = FamilyUnderTest(tiny_pipelines(family), CASES[family])
    model = subject.load_model()
    add_random_adapter(model, b_std=0.3)
    arguments = [subject.denoise_arguments(model, expert=expert) for expert in range(len(model.sigma_ranges))]
    # Do not record the attention of the encoders.
    monkeypatch.setattr(FamilyUnderTest, "denoise_arguments", lambda *_, expert: arguments[expert])
    plain, once = record_attention(subject, model, False)
    whole, twice = record_attention(subject, model, True)
    partly, kept = record_attention(subject, model, "attention")
    assert any(gradient.any() for gradient in plain.values())
    for name, gradient in plain.items():
        assert torch.equal(whole[name], gradient)
        assert torch.equal(partly[name], gradient), name
    short = [(queries, keys) for queries, keys in kept if keys < queries]
    assert len(kept) - len(short) == sum(keys >= queries for queries, keys in once), "self-attention was recomputed"
    assert len(short) == sum(keys < queries for queries, keys in twice), "cross-attention was kept"
    assert len(kept) < len(twice) or not any(keys >= queries for queries, keys in once)


class Block(torch.nn.Module):
    """Attention with dropout, followed by dropout."""

    def __init__(self, attention_dropout):
        super().__init__()
        self.projection, self.attention_dropout = torch.nn.Linear(8, 24, dtype=torch.float64), attention_dropout

    def forward(self, x):
        heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.projection(x).chunk(3, -1)]
        attended = functional.scaled_dot_product_attention(*heads, dropout_p=self.attention_dropout)
        return functional.dropout(x + attended.transpose(1, 2).flatten(2), 0.5)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
def test_dropout_draws_the_same_numbers_in_the_backward_pass(attention_dropout):
    torch.manual_seed(0)
    block, x = Block(attention_dropout), torch.randn(2, 6, 8, dtype=torch.float64)
    gradients = []
    for run in (block, lambda value: checkpoint_except_attention(block, value)):
        block.zero_grad()
        torch.manual_seed(1)
        torch.autograd.backward(run(x).square().sum())
        gradients.append(block.projection.weight.grad.clone())
    assert torch.equal(*gradients)


def test_memory_grows_by_the_outputs_until_the_backward_pass():
    block, kept = Block(0.0).to("meta").requires_grad_(True), []
    for run in (lambda x: checkpoint(block, x, use_reentrant=False), lambda x: checkpoint_except_attention(block, x)):
        x = torch.empty(2, 6, 8, dtype=torch.float64, device="meta")
        with LiveByteCounter("meta") as live, emulate_gpu_attention():
            outputs = [run(x) for _ in range(2)]  # as in RL with guidance: both forward passes come first
            kept.append(live.current)
            while outputs:
                torch.autograd.backward(outputs.pop().sum())
            block.zero_grad()
        assert live.current == 0
    log_sums = 2 * 2 * 6 * 4  # [B,H,S] float32
    assert 0 <= kept[1] - kept[0] - 2 * (2 * 6 * 8 * 8 + log_sums) < 100, "output and log-sums; seeds are a few bytes"
