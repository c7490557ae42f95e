"""Supported transformers and their grids of tokens. tests/multi_rank/test_ulysses.py tests outputs and gradients."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from each_case import check_each
from families import CASES
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.ulysses import install
from wfm_ds.ulysses.base import UlyssesTransformer
from wfm_ds.ulysses.install import find_family, install_ulysses, ulysses_families
from wfm_ds.ulysses.sd3 import UlyssesSD3


@pytest.mark.parametrize("denoiser", [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))])
def test_an_unknown_module_is_refused(denoiser):
    with pytest.raises(UserError, match="this model does not support sequence parallelism"):
        install_ulysses(denoiser, None)


@check_each("name", ["sd3", "cosmos25", "wan21", "wan22", "sana", "sana_video"])
def test_the_transformer_of_every_model_family_is_known(name, tiny_pipelines):
    options = {"dtype": torch.float32, "device": "cpu", **CASES[name].load_options}
    denoiser = registry.load_model(tiny_pipelines(name), **options).unwrapped_denoiser
    parts = [denoiser] if type(denoiser) in ulysses_families() else list(denoiser.children())
    assert parts
    assert all(type(part) in ulysses_families() for part in parts)


def test_a_family_in_an_imported_module_is_found():
    class MyNetwork(nn.Linear):
        pass

    class MyFamily(UlyssesTransformer):
        transformer_class = MyNetwork
        patch_embedding = "embed"
        shard_blocks = token_shard_sizes = None

    assert find_family(MyNetwork(1, 1)) is MyFamily


@check_each(
    ("config", "shape", "num_tokens"),
    [
        ({"patch_size": 2}, (4, 6, 8), 3 * 4),  # SD3
        ({"patch_size": (1, 2, 2)}, (4, 3, 6, 8), 3 * 3 * 4),  # Wan
        ({"patch_size": 1, "patch_size_t": 1}, (4, 3, 6, 8), 3 * 6 * 8),  # LTX-Video
        ({"patch_size": 2}, (4, 3, 6, 8), 3 * 3 * 4),  # Mochi
        ({"patch_size": 2, "patch_size_t": None}, (4, 3, 6, 8), 3 * 3 * 4),  # CogVideoX
        ({"patch_size": 2, "patch_size_t": 2}, (4, 4, 6, 8), 2 * 3 * 4),  # CogVideoX 1.5
    ],
)
def test_an_int_patch_size_is_for_height_and_width(config, shape, num_tokens):
    class Family(UlyssesTransformer):  # abstract, so that other tests do not find it
        pass

    Family.check_shape(SimpleNamespace(**config), num_tokens, shape)
    with pytest.raises(UserError, match=f"exceeds the number of tokens, {num_tokens};"):
        Family.check_shape(SimpleNamespace(**config), num_tokens + 1, shape)


@check_each(
    ("attributes", "says"),
    [
        ({"transformer_class": SD3Transformer2DModel}, "UlyssesSD3 and mine:Mine both shard SD3Transformer2DModel"),
        ({"transformer_class": nn.Linear, "patch_embedding": None}, "mine:Mine does not set patch_embedding"),
    ],
)
def test_an_invalid_family_is_named(attributes, says, monkeypatch):
    attributes = {"__module__": "mine", "__name__": "Mine", "patch_embedding": "embed", **attributes}
    mine = SimpleNamespace(**{name: value for name, value in attributes.items() if value is not None})
    monkeypatch.setattr(install, "concrete_subclasses", lambda base: [UlyssesSD3, mine])
    with pytest.raises(UserError, match=says):
        ulysses_families()
