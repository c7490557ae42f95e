"""Switching between adapters, compared with PEFT's own functions."""

import copy

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from each_case import check_each
from multi_rank.training import inputs, small_sd3
from wfm_ds.engine.policies import AdapterDropout, add_adapters, check_adapter_names
from wfm_ds.models.wan import Experts
from wfm_ds.recipe.sections import LoraRecipe

ORDER = ["old", None, "default", None, "ema", "old", "default", None, None, "default"]


@pytest.fixture(params=["one", "experts"])
def denoiser(request):
    """Return a network with three different adapters, or two such networks as experts, with the Adapters object."""
    module = small_sd3() if request.param == "one" else Experts({"first": small_sd3(), "second": small_sd3()})
    adapters = add_adapters(module, LoraRecipe(rank=2, alpha=4), ["to_q", "to_out.0"], ["old", "ema"], seed=0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.1)
    return module, adapters


def switch_by_peft(module, name):
    """Switch with PEFT's own functions; only `default` is trainable."""
    if name is None:
        module.disable_adapters()
    else:
        module.enable_adapters()
        module.set_adapter(name)
    for full_name, parameter in module.named_parameters():
        parameter.requires_grad_(".default." in full_name)


def state(module):
    """Return the active adapters and the enabled state of each layer, and requires_grad of each parameter."""
    layers = {
        name: (part.active_adapters, part.active_adapter, part.disable_adapters)
        for name, part in module.named_modules()
        if isinstance(part, BaseTunerLayer)
    }
    return layers, {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def outputs(module):
    with torch.no_grad():
        return [
            part(**inputs(range(1), torch.float32), return_dict=False)[0]
            for part in getattr(module, "networks", [module])
        ]


def test_every_switch_equals_pefts_switch(denoiser):
    module, adapters = denoiser
    twin = copy.deepcopy(module)
    switch_by_peft(twin, "default")
    assert state(module) == state(twin)
    seen = {}
    for name in ORDER:
        adapters.activate(name)
        switch_by_peft(twin, name)
        assert state(module) == state(twin), name
        seen[name] = outputs(module)
        assert all(map(torch.equal, seen[name], outputs(twin))), name
    for name in seen:
        others = [other for other in seen if other != name]
        assert not any(torch.equal(seen[name][0], seen[other][0]) for other in others), name


def test_a_switch_visits_no_module(denoiser, monkeypatch):
    module, adapters = denoiser
    walks = []
    walk = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda self, *a, **k: walks.append(self) or walk(self, *a, **k))
    for name in ORDER:
        adapters.activate(name)
    assert walks == []
    switch_by_peft(module, "default")
    assert walks


def test_extra_adapters_start_like_default_and_frozen_adapters_from_their_own_tensors():
    first, teacher = ({} for _ in range(2))
    for values, seed in ((first, 1), (teacher, 2)):
        source, draw = small_sd3(), torch.Generator().manual_seed(seed)
        add_adapters(source, LoraRecipe(rank=2, alpha=4), ["to_q"], [], seed=0)
        named = [(name, p) for name, p in source.named_parameters() if ".default." in name]
        values |= {name.replace(".default.", "."): torch.randn(p.shape, generator=draw) for name, p in named}
    module = small_sd3()
    names = {"names": ["ema"], "extra": ["fake"], "frozen": {"teacher": teacher}}
    add_adapters(module, LoraRecipe(rank=2, alpha=4), ["to_q"], seed=0, initial_values=first, **names)
    expected = {"default": (first, True), "ema": (first, False), "fake": (first, True), "teacher": (teacher, False)}
    parameters = dict(module.named_parameters())
    for adapter, (values, is_trained) in expected.items():
        for name, value in values.items():
            parameter = parameters.pop(name.replace(".weight", f".{adapter}.weight"))
            assert torch.equal(parameter, value)
            assert parameter.requires_grad == is_trained
    assert not any(parameter.requires_grad for parameter in parameters.values())
    name = next(iter(teacher))
    for wrong in ({"other.weight": teacher[name]}, {name: teacher[name][:1]}):
        with pytest.raises(ValueError, match="the adapter teacher has no tensor "):
            add_adapters(small_sd3(), LoraRecipe(rank=2, alpha=4), ["to_q"], [], 0, frozen={"teacher": wrong})


@check_each(
    ("names", "lora", "error"),
    [
        (["fake"], False, "extra and frozen adapters need LoRA training: fake"),
        (["ema"], True, "ema cannot be"),
        (["default"], True, "default cannot be"),
        (["a.b"], True, "a.b cannot be"),
        (["fake", "fake"], True, "fake cannot be"),
    ],
)
def test_names_of_adapters_are_checked(names, lora, error):
    check_adapter_names([], lora=lora)
    check_adapter_names(["fake", "teacher_0"], lora=True)
    with pytest.raises(ValueError, match=error):
        check_adapter_names(names, lora=lora)


def test_dropout_masks_depend_on_the_step_and_need_a_gradient():
    module = small_sd3()
    adapters = add_adapters(module, LoraRecipe(rank=2, alpha=4, dropout=0.5), ["to_q"], ["ema"], seed=0)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    cpu = torch.device("cpu")

    def forward(dropout, step):
        with dropout.seed_masks(step, cpu):
            return module(**inputs(range(1)), return_dict=False)[0].detach()

    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, resumed, other_rank = (AdapterDropout(module, 3, rank) for rank in (0, 0, 1))
    drawn = [forward(first, 0), forward(first, 0), forward(first, 1)]
    assert torch.equal(forward(resumed, 1), drawn[2])
    assert not any(torch.equal(drawn[2], other) for other in (drawn[0], drawn[1], forward(other_rank, 1)))
    assert not torch.equal(drawn[0], drawn[1])
    with torch.no_grad():
        assert torch.equal(forward(first, 0), forward(other_rank, 5))
    assert torch.equal(torch.get_rng_state(), before)
    adapters.activate("ema")
    assert torch.equal(forward(first, 0), forward(first, 1))
