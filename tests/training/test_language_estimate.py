"""Estimated activations and logits of a language run, compared with the live tensors in a step of the real model."""

import gc
from pathlib import Path

import pytest
import torch

from wfm_ds.demos.squares_data import write_squares
from wfm_ds.engine.live_bytes import LiveByteCounter
from wfm_ds.language import attention
from wfm_ds.language import model as language_model
from wfm_ds.language.annotations import parse_conversation, read_rows
from wfm_ds.language.memory import estimate_language_memory
from wfm_ds.language.packed_sequences import ConversationSize, SequencePacker
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.recipe import file as recipe_file
from wfm_ds.training.language_builder import make_meta_copy, make_sample_reader
from wfm_ds.training.preflight import check_run


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    return folder


def recipe_of(root, squares, *overrides):
    places = [f"data.path={squares}/annotations.json", f"data.media_path={squares}", "run.output_dir=unused"]
    return recipe_file.load_recipe(root / "tests" / "recipes" / "reason_llava_sft.yaml", [*places, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen25vl", "qwen3vl"])
@pytest.mark.parametrize("changes", [[], ["model.gradient_checkpointing=true"], ["algorithm.freeze=[vision, merger]"]])
def test_estimated_activations_equal_the_live_tensors_of_a_step(root, squares, family, changes):
    recipe = recipe_of(root, squares, f"model.path=tiny:{family}", "data.max_tokens=1024", *changes)
    model = language_model.load_language_model(str(get_tiny_folder(family)), torch.float32)
    reader = make_sample_reader(recipe, model)
    found = [
        parse_conversation(row, name, root=str(squares)) for name, row in read_rows(Path(squares) / "annotations.json")
    ][:20]
    sizes = [reader.measure(one) for one in found]
    whole = ConversationSize(*(sum(part) for part in zip(*sizes, strict=True)))
    phase = estimate_language_memory(recipe, model, make_meta_copy(recipe, model), whole, 1, device="cpu").phases[
        "train"
    ]
    model.uses_segments = attention.install_segment_attention(model.network)
    for name in model.group_parameter_names(recipe.language_settings.freeze):
        model.network.get_parameter(name).requires_grad_(False)
    if changes == ["model.gradient_checkpointing=true"]:
        model.network.enable_gradient_checkpointing()
    for parameter in model.network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    row = SequencePacker(model.rotary_positions, [], by_sample=False).pack_samples([reader.read(one) for one in found])
    assert (row.input_ids.numel(), len(row.label_positions)) == (whole.tokens, whole.labelled)
    gc.collect()
    with LiveByteCounter("cpu") as live:
        losses = model.predict(row).losses
        losses.sum().backward()
    assert phase["activations"] + phase["logits"] == pytest.approx(
        live.peak + row.media["pixel_values"].nbytes, rel=0.2
    )


def test_a_check_shows_the_parts(root, squares, tmp_path):
    lines = str(check_run(recipe_of(root, squares, f"run.output_dir={tmp_path / 'run'}"), 2))
    for part in ("weights", "optimizer states", "activations", "logits", "gradients", "DeepSpeed"):
        assert f"\n  {part} " in lines
    assert "model parameters           112,320, trained 112,320" in lines
    assert "fits a GPU of 24 GB" in lines or "of this GPU" in lines
