"""The FLOP formula for a packed row, compared with torch's FLOP count of a forward and a backward pass."""

import pytest
import torch

from conversations import samples_of
from each_case import check_each
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.engine.flop_counter import make_flop_counter
from wfm_ds.engine.policies import add_adapters
from wfm_ds.language import attention
from wfm_ds.language import model as language_model
from wfm_ds.language.flops import SequenceWork
from wfm_ds.language.packed_sequences import SequencePacker
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.recipe.sections import LoraRecipe


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Write images that span several attention windows of the vision tower."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    Image.new("RGB", (150, 100)).save(folder / "images" / "001.png")
    return folder


@check_each("family", ["qwen25vl", "qwen3vl"])
@check_each("trained", ["all", "no vision", "merger alone", "lora"])
def test_the_formula_equals_the_flops_counted_by_torch(monkeypatch, squares, family, trained):
    model = language_model.load_language_model(str(get_tiny_folder(family)), torch.float32)
    network = model.network
    model.uses_segments = attention.install_segment_attention(network)
    network.config.vision_config._attn_implementation = "eager"  # torch counts the FLOPs of eager attention on a CPU
    monkeypatch.setattr(attention, "segment_attention", plain)
    if trained == "lora":
        add_adapters(network, LoraRecipe(rank=3, alpha=3), model.default_lora_targets, [], seed=0)
    frozen = {"no vision": ["vision"], "merger alone": ["vision", "language"]}.get(trained, [])
    for name in model.group_parameter_names(frozen):
        network.get_parameter(name).requires_grad_(False)
    samples = samples_of(model, squares, max_tokens=512, pixels={"min": 1, "max": 150 * 100})
    row = SequencePacker(model.rotary_positions, [], by_sample=False).pack_samples(samples)
    for checkpointing in (False, True):
        if checkpointing:
            network.enable_gradient_checkpointing()
        with make_flop_counter() as counter:
            model.predict(row).losses.sum().backward()
        found = SequenceWork(network, checkpointing=checkpointing).estimate(row)
        assert found.required + found.recomputed == pytest.approx(counter.get_total_flops(), rel=0.01)
        assert (found.recomputed > 0) == checkpointing


def plain(query, key, value, segments, *, scaling, dropout):
    """Attention with plain matrix products, which torch's FLOP counter counts."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    parts = [
        (q @ k.mT * scaling).softmax(-1) @ v
        for q, k, v in zip(*(x.split(segments, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, 2)
