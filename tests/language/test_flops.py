"""The work of a row by its formula, against the operators of a forward and a backward pass, counted by torch."""

import pytest
import torch

from each_case import check_each
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.engine.flop_counter import make_flop_counter
from wfm_ds.engine.policies import add_adapters
from wfm_ds.language import attention
from wfm_ds.language import model as language_model
from wfm_ds.language.annotations import parse_conversation, read_rows
from wfm_ds.language.flops import SequenceSize, SequenceWork
from wfm_ds.language.media import MediaReader
from wfm_ds.language.packed_sequences import ConversationReader, SequencePacker
from wfm_ds.language.renderer import Renderer
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sections import LoraRecipe


def row_of(model, folder):
    data = DataRecipe.model_validate({"kind": "llava", "path": "x", "pixels": {"min": 1, "max": 150 * 100}})
    media = MediaReader(model.image_processor, data)
    reader = ConversationReader(
        Renderer(model.tokenizer), media, has_frame_times=model.has_frame_times, max_tokens=512, too_long="skip"
    )
    rows = [
        parse_conversation(row, name, root=str(folder))
        for name, row in list(read_rows(folder / "annotations.json"))[:3]
    ]
    return SequencePacker(model.rotary_positions, [], by_sample=False).pack_samples([reader.read(row) for row in rows])


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Pictures of several windows of the tower."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    Image.new("RGB", (150, 100)).save(folder / "images" / "001.png")
    return folder


@check_each("family", ["qwen25vl", "qwen3vl"])
@check_each("trained", ["all", "no vision", "merger alone", "lora"])
def test_the_formula_is_what_torch_counts(monkeypatch, squares, family, trained):
    model = language_model.load_language_model(str(get_tiny_folder(family)), torch.float32)
    network = model.network
    model.uses_segments = attention.install_segment_attention(network)
    network.config.vision_config._attn_implementation = "eager"  # whose products torch can count on a CPU
    monkeypatch.setattr(attention, "segment_attention", plain)
    if trained == "lora":
        add_adapters(network, LoraRecipe(rank=3, alpha=3), model.default_lora_targets, [], seed=0)
    frozen = {"no vision": ["vision"], "merger alone": ["vision", "language"]}.get(trained, [])
    for name in model.group_parameter_names(frozen):
        network.get_parameter(name).requires_grad_(False)
    row = row_of(model, squares)
    for checkpointing in (False, True):
        if checkpointing:
            network.enable_gradient_checkpointing()
        with make_flop_counter() as counter:
            model.predict(row).losses.sum().backward()
        found = SequenceWork(network, checkpointing=checkpointing).estimate(SequenceSize.from_sequence(row))
        assert found.required + found.recomputed == pytest.approx(counter.get_total_flops(), rel=0.01)
        assert (found.recomputed > 0) == checkpointing


def plain(query, key, value, segments, *, scaling, dropout):
    """Attention by the textbook, whose products torch counts."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    parts = [
        (q @ k.mT * scaling).softmax(-1) @ v
        for q, k, v in zip(*(x.split(segments, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, 2)
