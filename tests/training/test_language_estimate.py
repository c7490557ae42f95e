"""Activations and logits of a language run's estimate, against the tensors that live in a step of the real model."""

import gc
from pathlib import Path

import pytest
import torch

from wfm_ds.data.squares import write_squares
from wfm_ds.engine.live import LiveBytes
from wfm_ds.language import attention
from wfm_ds.language import model as language_model
from wfm_ds.language.annotations import parsed, rows_of
from wfm_ds.language.lengths import Size
from wfm_ds.language.rows import RowMaker
from wfm_ds.models.registry import cached_tiny
from wfm_ds.recipe import file as recipe_file
from wfm_ds.training.check import check
from wfm_ds.training.language_build import reader_of, trained_shadow
from wfm_ds.training.language_estimate import language_estimate


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    return folder


def recipe_of(root, squares, *overrides):
    places = [f"data.path={squares}/annotations.json", f"data.media_path={squares}", "run.output_dir=unused"]
    return recipe_file.load(root / "recipes" / "tiny" / "reason_llava_sft.yaml", [*places, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen25vl", "qwen3vl"])
@pytest.mark.parametrize("changes", [[], ["model.gradient_checkpointing=true"], ["algorithm.freeze=[vision, merger]"]])
def test_activations_are_those_that_live_in_a_step(root, squares, family, changes):
    recipe = recipe_of(root, squares, f"model.path=tiny:{family}", "data.max_tokens=1024", *changes)
    model = language_model.load(str(cached_tiny(family)), torch.float32)
    reader = reader_of(recipe, model)
    found = [parsed(row, name, root=str(squares)) for name, row in rows_of(Path(squares) / "annotations.json")][:20]
    sizes = [reader.size(one) for one in found]
    whole = Size(*(sum(part) for part in zip(*sizes, strict=True)))
    phase = language_estimate(recipe, model, trained_shadow(recipe, model), whole, 1, device="cpu").phases["train"]
    model.by_segments = attention.install(model.network)
    for name in model.frozen(recipe.language.freeze):
        model.network.get_parameter(name).requires_grad_(False)
    if changes == ["model.gradient_checkpointing=true"]:
        model.network.enable_gradient_checkpointing()
    for parameter in model.network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    row = RowMaker(model.positions, [], by_sample=False).row([reader.read(one) for one in found])
    assert (row.input_ids.numel(), len(row.kept)) == (whole.tokens, whole.labelled)
    gc.collect()
    with LiveBytes("cpu") as live:
        losses = model.predict(row).losses
        losses.sum().backward()
    assert phase["activations"] + phase["logits"] == pytest.approx(
        live.peak + row.media["pixel_values"].nbytes, rel=0.2
    )


def test_a_check_shows_the_parts(root, squares, tmp_path):
    lines = str(check(recipe_of(root, squares, f"run.output_dir={tmp_path / 'run'}"), 2))
    for part in ("weights", "optimizer states", "activations", "logits", "gradients", "DeepSpeed"):
        assert f"\n  {part} " in lines
    assert "model parameters           112,320, trained 112,320" in lines
    assert "fits a GPU of 24 GB" in lines or "of this GPU" in lines
