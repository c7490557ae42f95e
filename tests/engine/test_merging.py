"""Merged adapters: plain layers compute the same forward, and unmerging restores the weights bit by bit."""

import pytest
import torch

from multi_rank.training import TARGETS, inputs, small_sd3
from wfm_ds.engine.adapter_layers import use_merged_weights
from wfm_ds.engine.policies import add_adapters
from wfm_ds.recipe.sections import LoraRecipe


def adapted(dtype):
    """Return a denoiser with the adapters `default` and `old`, both with random B matrices, and its Adapters object."""
    denoiser = small_sd3().eval()
    adapters = add_adapters(denoiser, LoraRecipe(rank=4, alpha=8), TARGETS, ["old"], seed=0)
    assert len(adapters.layers) == 9
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in denoiser.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return denoiser.to(dtype), adapters


def output(denoiser, dtype):
    with torch.no_grad():
        return denoiser(**inputs(range(3), dtype), return_dict=False)[0].float()


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_merging_keeps_the_forward_and_unmerging_restores_the_weights(dtype, close):
    (denoiser, adapters), computed = adapted(dtype), []
    before = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in denoiser.parameters()]
    adapters.activate("old")
    want = output(denoiser, dtype)
    for layer in adapters.layers:
        layer.lora_A["old"].register_forward_hook(lambda *_: computed.append("adapter"))
        layer.get_base_layer().register_forward_hook(lambda *_: computed.append("plain"))
    adapters.activate(None)
    bare = output(denoiser, dtype)
    computed.clear()
    with use_merged_weights(adapters.layers, "old"):
        got = output(denoiser, dtype)
    assert computed == ["plain"] * 9
    assert (got - want).norm() / want.norm() < close
    assert (bare - want).norm() / want.norm() > 3 * close
    assert denoiser.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.state_dict().items())
    assert [parameter.data_ptr() for parameter in denoiser.parameters()] == addresses
    assert torch.equal(output(denoiser, dtype), bare)
    adapters.activate("old")
    assert torch.equal(output(denoiser, dtype), want)


def test_an_error_while_merged_restores_the_weights():
    denoiser, adapters = adapted(torch.float32)
    before = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    with pytest.raises(KeyError), use_merged_weights(adapters.layers, "default"):
        raise KeyError
    with pytest.raises(KeyError), use_merged_weights(adapters.layers, "no such adapter"):
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.state_dict().items())
