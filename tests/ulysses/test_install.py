"""Which modules are known; what becomes of them needs ranks (distributed/test_ulysses.py)."""

import pytest
import torch
from torch import nn

from each_case import check_each
from families import CASES
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.ulysses.install import install_ulysses, ulysses_families


@pytest.mark.parametrize("denoiser", [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))])
def test_an_unknown_module_is_named_with_the_known_ones(denoiser):
    message = (
        f"{type(denoiser).__name__} does not support sequence parallelism: set engine.sequence_parallel to 1, "
        "or use .*CosmosTr"
    )
    with pytest.raises(UserError, match=message):
        install_ulysses(denoiser, None)


@check_each("name", ["sd3", "cosmos25", "wan21", "wan22", "sana", "sana_video"])
def test_the_transformer_of_every_model_family_is_known(name, tiny_pipelines):
    options = {"dtype": torch.float32, "device": "cpu", **CASES[name].load_options}
    denoiser = registry.load_model(tiny_pipelines(name), **options).unwrapped_denoiser
    parts = [denoiser] if type(denoiser) in ulysses_families() else list(denoiser.children())
    assert parts
    assert all(type(part) in ulysses_families() for part in parts)
