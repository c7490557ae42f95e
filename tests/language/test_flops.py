"""The work of a row by its formula, against the operators of a forward and a backward pass, counted by torch."""

import pytest
import torch

from wfm_ds.data.squares import write_squares
from wfm_ds.engine.flops import counting
from wfm_ds.engine.policy import add_adapters
from wfm_ds.language import attention
from wfm_ds.language import model as language_model
from wfm_ds.language.annotations import parsed, rows_of
from wfm_ds.language.flops import RowSize, RowWork
from wfm_ds.language.media import MediaReader
from wfm_ds.language.render import Renderer
from wfm_ds.language.rows import RowMaker, SampleReader
from wfm_ds.models.registry import cached_tiny
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sections import LoraRecipe


def row_of(model, folder):
    data = DataRecipe.model_validate({"kind": "llava", "path": "x", "pixels": {"min": 1, "max": 150 * 100}})
    media = MediaReader(model.image_processor, data)
    reader = SampleReader(
        Renderer(model.tokenizer), media, timed_frames=model.timed_frames, max_tokens=512, too_long="skip"
    )
    rows = [parsed(row, name, root=str(folder)) for name, row in list(rows_of(folder / "annotations.json"))[:3]]
    return RowMaker(model.positions, [], by_sample=False).row([reader.read(row) for row in rows])


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Pictures of several windows of the tower."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    Image.new("RGB", (150, 100)).save(folder / "images" / "001.png")
    return folder


@pytest.mark.parametrize("family", ["qwen25vl", "qwen3vl"])
@pytest.mark.parametrize("trained", ["all", "no vision", "merger alone", "lora"])
def test_the_formula_is_what_torch_counts(monkeypatch, squares, family, trained):
    model = language_model.load(str(cached_tiny(family)), torch.float32)
    network = model.network
    model.by_segments = attention.install(network)
    network.config.vision_config._attn_implementation = "eager"  # whose products torch can count on a CPU
    monkeypatch.setattr(attention, "within", plain)
    if trained == "lora":
        add_adapters(network, LoraRecipe(rank=3, alpha=3), model.default_lora_targets, [], seed=0)
    frozen = {"no vision": ["vision"], "merger alone": ["vision", "language"]}.get(trained, [])
    for name in model.frozen(frozen):
        network.get_parameter(name).requires_grad_(False)
    row = row_of(model, squares)
    for checkpointing in (False, True):
        if checkpointing:
            network.enable_gradient_checkpointing()
        with counting() as counter:
            model.predict(row).losses.sum().backward()
        found = RowWork(network, checkpointing=checkpointing).of(RowSize.of(row))
        assert found.needed + found.repeated == pytest.approx(counter.get_total_flops(), rel=0.01)
        assert (found.repeated > 0) == checkpointing


def plain(query, key, value, segments, *, scaling, dropout):
    """Attention by the textbook, whose products torch counts."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    parts = [
        (q @ k.mT * scaling).softmax(-1) @ v
        for q, k, v in zip(*(x.split(segments, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, 2)
