from itertools import chain

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from wfm_ds.engine.adapter_layers import match_linear_layers, peft_targets


def network():
    """Return two kinds of blocks: `to_out` is a list of layers in one and a layer in the other, so no suffix matches
    both."""
    double = {"to_q": nn.Linear(2, 2), "to_out": nn.ModuleList([nn.Linear(2, 2), nn.Dropout()])}
    single = {"to_qkv": nn.Linear(2, 2), "to_out": nn.Linear(2, 2)}
    kinds = {"blocks": double, "single_blocks": single}
    return nn.ModuleDict({name: nn.ModuleList([nn.ModuleDict(kind)]) for name, kind in kinds.items()})


def test_a_block_number_placeholder_selects_layers_that_no_suffix_can():
    targets = ("to_q", "to_out.0", "single_blocks.{}.to_out")
    names = ["blocks.0.to_q", "blocks.0.to_out.0", "single_blocks.0.to_out"]
    assert match_linear_layers(network(), targets) == names
    assert peft_targets(network(), targets) == ["to_q", "to_out.0", "single_blocks.0.to_out"]
    assert list(chain(*(match_linear_layers(network(), [target]) for target in targets))) == names


def test_targets_match_the_layers_that_peft_adapts():
    targets = ("to_q", "to_qkv", "to_out.0", "single_blocks.{}.to_out")
    adapted = inject_adapter_in_model(LoraConfig(target_modules=peft_targets(network(), targets)), network())
    found = [name for name, part in adapted.named_modules() if isinstance(part, LoraLayer)]
    assert found == match_linear_layers(network(), targets)
    assert match_linear_layers(network(), ["q", "ks.0.to_q", "single_blocks.{}"]) == []
