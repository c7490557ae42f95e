"""LoRA files in the layouts of other tools: round trips, loading with diffusers, and ComfyUI's arithmetic."""

import json
import re

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from commands import wfm_command
from each_case import check_each
from pages import DOCS, table_rows
from wfm_ds.engine.adapter_layers import match_linear_layers
from wfm_ds.export.lora_base import base_weight_readers, denoiser_parts, read_lora
from wfm_ds.export.lora_extraction import approximate_difference
from wfm_ds.export.lora_file import LoraSource, iter_lora_tensors, lora_settings
from wfm_ds.export.lora_layers import LoraLayer, fuse_layers, is_same_update, split_layer
from wfm_ds.export.lora_layouts import comfyui_tensors, kohya_tensors
from wfm_ds.export.lora_settings import layer_alpha
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import write_lora
from wfm_ds.models import registry
from wfm_ds.models.flux_kontext import FluxKontext
from wfm_ds.models.lora_layer_names import LoraNameTable
from wfm_ds.models.wan import IMAGE_ATTENTION_LAYERS

convert = wfm_command("convert")
FAMILIES = (
    *("sd3", "sana", "sana_video", "cosmos25", "wan21", "wan22", "wan21_i2v", "wan_vace"),
    *("flux2", "flux_kontext", "qwen_image", "z_image"),
)
RANK, ALPHA = 4, 10.0


def run(capsys, *words):
    code = convert(words)
    printed = capsys.readouterr()
    return code, printed.err if code else printed.out


def layers_of(network, targets, weight, dora):
    """Return a LoRA for every layer of the denoiser that is a default target of the family."""
    draw = torch.Generator().manual_seed(1)
    layers = {}
    for name in match_linear_layers(network, targets):
        part = network.get_submodule(name)
        A = torch.randn(RANK, part.in_features, generator=draw)
        B = 0.1 * torch.randn(part.out_features, RANK, generator=draw)
        norms = (weight(name) + LoraLayer(A, B, ALPHA).delta()).norm(dim=1) if dora else None
        layers[name] = LoraLayer(A, B, ALPHA, None if norms is None else 1.1 * norms)
    return layers


@pytest.fixture
def export(tiny_pipelines, tmp_path):
    """`export("sd3")`: return the LoRA folder of an export, its layers by part, and the model folder."""

    def made(family, dora=False):
        folder = tiny_pipelines(family)
        target, weights = ExportTarget(folder, denoiser_parts(folder)), base_weight_readers(folder)
        targets = registry.find_family(folder).default_lora_targets
        targets = (*targets, *IMAGE_ATTENTION_LAYERS) if family == "wan21_i2v" else targets
        parts = {part: layers_of(target.meta_network(part), targets, weights(part), dora) for part in target.parts}
        settings = lora_settings(parts, {}, {"base_model_name_or_path": str(folder)})
        lora = tmp_path / family / "lora"
        lora.parent.mkdir()
        write_lora([(p, iter_lora_tensors(own, {})) for p, own in parts.items()], settings, lora, shapes=None)
        return lora, parts, folder

    return made


@check_each("family", FAMILIES)
def test_converting_there_and_back_is_lossless(family, export, tmp_path, capsys):
    lora, parts, folder = export(family)
    for layout in ("kohya", "comfyui", "peft"):
        there = tmp_path / layout / ("there" if layout == "peft" else "there.safetensors")
        code, text = run(capsys, lora, there, "--layout", layout)
        assert code == 0, text
        assert f"rank {RANK}, alpha {ALPHA:g}, layout {layout}" in text
        for part, layers in parts.items():
            back, _ = read_lora(written(there, part, len(parts)), folder)
            assert_equal(back.layers["transformer"], layers)


def written(there, part, num_parts):
    """Return the file or folder of one part, as named by `write_layout` and `write_peft`."""
    if num_parts == 1:
        return there
    noise = {"transformer": "high_noise", "transformer_2": "low_noise"}[part]
    return there.with_name(f"there_{noise}.safetensors") if there.suffix else there / part


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, layer in got.items():
        assert torch.equal(layer.A, want[name].A)
        assert torch.equal(layer.B, want[name].B)
        assert layer.alpha == ALPHA


def test_fused_layers_give_the_updates_of_their_members(export):
    _, parts, folder = export("sd3")
    tensors = kohya_tensors(parts["transformer"], registry.find_family(folder))
    key = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    down, up, alpha = (tensors[f"{key}.{kind}"] for kind in ("lora_down.weight", "lora_up.weight", "alpha"))
    whole = up @ down * (alpha / len(down))
    own = [parts["transformer"][f"transformer_blocks.0.attn.to_{n}"].delta() for n in "qkv"]
    assert_close(whole, torch.cat(own), atol=1e-6, rtol=1e-6)


def test_a_foreign_fused_layer_is_split_exactly():
    draw = torch.Generator().manual_seed(2)
    whole = LoraLayer(torch.randn(6, 8, generator=draw), torch.randn(12, 6, generator=draw), 3.0)
    parts = split_layer(whole, (1, 1, 1))
    assert_close(torch.cat([part.delta() for part in parts]), whole.delta(), atol=1e-6, rtol=1e-6)
    one = LoraLayer(torch.randn(2, 8, generator=draw), torch.randn(4, 2, generator=draw), 5.0)
    assert split_layer(fuse_layers([None, one, None]), (1, 1, 1))[0] is None
    back = split_layer(fuse_layers([None, one, None]), (1, 1, 1))[1]
    assert is_same_update({"a": back}, {"a": one}, tolerance=0.0)
    other = LoraLayer(one.A, one.B, 1.0)  # a different scale is moved into B
    assert_close(fuse_layers([one, other]).delta(), torch.cat([one.delta(), other.delta()]), atol=1e-6, rtol=1e-6)


def updates_in_diffusers(folder, file):
    """Load a file with plain diffusers. Return the weight updates by layer, or the error message."""
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    try:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="default")
    except (ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    layers = {name: m for name, m in pipe.transformer.named_modules() if "default" in getattr(m, "lora_A", ())}
    return {name: layer.get_delta_weight("default").detach() for name, layer in layers.items()}


ALPHA_IS_UNEXPECTED = "should be empty at this point"
LOADED_BY_DIFFUSERS = {  # by family: comfyui, comfyui with --bake-alpha, and kohya; as in docs/exports.md
    "sd3": ("Invalid LoRA checkpoint", True, {}),
    "wan21": (True, True, None),
    "flux2": (ALPHA_IS_UNEXPECTED, True, True),
    "flux_kontext": (True, True, None),  # diffusers splits kohya's fused layers at the width of the released model
    "qwen_image": ("Target modules", True, True),
    "z_image": (ALPHA_IS_UNEXPECTED, "Target modules", True),
}
NAMES_IN_DOCS = {
    "SD3": "sd3",
    "Wan": "wan21",
    "FLUX.2": "flux2",
    "FLUX.1-Kontext": "flux_kontext",
    "Qwen-Image": "qwen_image",
    "Z-Image": "z_image",
}


@check_each(("family", "outcomes"), LOADED_BY_DIFFUSERS.items())
@pytest.mark.slow
def test_diffusers_loads_the_layouts_listed_in_the_docs(family, outcomes, export, tmp_path, capsys):
    lora, parts, folder = export(family)
    want = {name: layer.delta() for name, layer in parts["transformer"].items()}
    cases = zip((["comfyui"], ["comfyui", "--bake-alpha"], ["kohya"]), outcomes, strict=True)
    for number, (options, outcome) in enumerate(cases):
        file = tmp_path / f"{number}.safetensors"
        assert run(capsys, lora, file, "--layout", *options)[0] == 0
        got = updates_in_diffusers(folder, file) if outcome is not None else None
        if isinstance(outcome, str):
            assert outcome in got
        elif outcome is True:
            assert_same_updates(got, want)
        else:
            assert got == outcome
    assert_same_updates(updates_in_diffusers(folder, lora / "model.safetensors"), want)
    assert run(capsys, file, tmp_path / "back", "--base", folder)[0] == 0
    assert_same_updates(updates_in_diffusers(folder, tmp_path / "back" / "lora" / "model.safetensors"), want)


def who_reads_what():
    """Yield (tool, names of its models, cells) for each row of the table in docs/exports.md."""
    for reader, *cells in table_rows("exports.md", "| | diffusers export |"):
        tool, _, models = reader.partition(", ")
        yield tool, re.split(", | and ", models), cells


def test_the_docs_say_what_diffusers_loads():
    listed = {}
    for tool, models, (own, *cells) in who_reads_what():
        if tool == "diffusers":
            assert own == "yes"
            listed |= {NAMES_IN_DOCS[model]: cells for model in models}
    assert listed.keys() == LOADED_BY_DIFFUSERS.keys()
    for family, outcomes in LOADED_BY_DIFFUSERS.items():
        for cell, outcome in zip(listed[family], outcomes, strict=True):
            assert (cell == "yes") == (outcome is True), family
            assert ("without an error" in cell) == (outcome == {}), family
            assert all(quoted in outcome for quoted in re.findall('"(.*?)"', cell)), family


def test_the_docs_name_the_models_that_comfyui_reads_at_half_strength():
    rows = [(models, cells) for tool, models, cells in who_reads_what() if tool == "ComfyUI"]
    without_alpha = {model for models, cells in rows for model in models if "at scale 1" in cells[0]}
    page = " ".join((DOCS / "exports.md").read_text().split())
    [named] = re.findall(r"An export of (.*?) with the default alpha 64 and rank 32 .*? \*\*half its strength in", page)
    assert {*re.split(", | or ", named)} == without_alpha == NAMES_IN_DOCS.keys() - {"Wan"}


def assert_same_updates(got, want):
    assert got.keys() == want.keys()
    for name, delta in want.items():
        assert_close(got[name], delta, atol=1e-5, rtol=1e-5)


def test_dora_in_comfyui_is_the_weight_that_peft_computes(export, tmp_path, capsys):
    lora, parts, folder = export("wan21", dora=True)
    out = tmp_path / "dora.safetensors"
    code, text = run(capsys, lora, out, "--layout", "comfyui")
    assert code == 0, text
    tensors = load_file(out)
    for name, layer in parts["transformer"].items():
        weight = base_weight_readers(folder)("transformer")(name)
        key = f"diffusion_model.{LoraNameTable(registry.find_family(folder).lora_layer_names).find_original(name)[0]}"
        added = weight + layer.delta()  # comfy/weight_adapter/base.py of ComfyUI 0.3.77
        theirs = added * (tensors[f"{key}.dora_scale"] / weight.norm(dim=1, keepdim=True))
        assert_close(theirs, layer.merge_weight(weight), atol=1e-5, rtol=1e-5)
    back, _ = read_lora(out, folder)
    for name, layer in back.layers["transformer"].items():
        assert_close(layer.magnitude, parts["transformer"][name].magnitude, atol=1e-5, rtol=1e-5)


def test_the_scale_of_peft_settings():
    assert layer_alpha({"lora_alpha": 8, "use_rslora": True}, "a.b", 16) / 16 == 8 / 16**0.5
    assert layer_alpha({"lora_alpha": 8, "alpha_pattern": {"b": 3}}, "a.b", 16) == 3


def test_unsuitable_files_and_options_are_one_line_errors(export, tmp_path, capsys):
    lora, parts, folder = export("sd3")
    out = tmp_path / "out.safetensors"
    one = next(iter(parts["transformer"].values()))
    strange = {"lora_te1_text_model.lora_down.weight": one.A, "lora_te1_text_model.lora_up.weight": one.B}
    save_file(strange, tmp_path / "text.safetensors")
    for words, part in (
        ([tmp_path / "text.safetensors", tmp_path / "x"], "names are not layers of the denoiser (lora_te1_text_model)"),
        ([lora, tmp_path / "folder", "--layout", "kohya"], "layout kohya needs a file name that ends with"),
        ([lora, out, "--layout", "kohya", "--merge"], "--merge writes a whole pipeline"),
        ([lora, out, "--rank", 3], "need --extract BASE"),
        ([folder, out, "--extract", folder], "needs --rank R, --energy FRACTION"),
        ([folder, tmp_path / "e", "--extract", folder, "--rank", 3], "there is nothing to extract"),
        ([tmp_path / "nothing.safetensors", out, "--layout", "kohya"], "does not exist"),
    ):
        code, text = run(capsys, *words)
        assert (code, text.count("\n")) == (2, 1), text
        assert part in text
    other = {"unknown.lora_A.weight": one.A, "unknown.lora_B.weight": one.B}
    save_file(other, tmp_path / "other.safetensors")
    code, text = run(capsys, tmp_path / "other.safetensors", out, "--layout", "kohya", "--base", folder)
    assert (code, "1 layers of the LoRA have no name in the original sd3" in text) == (2, True)
    assert not any(path.exists() for path in (out, tmp_path / "e"))


def test_extraction_gives_the_lora_that_was_merged(export, tmp_path, capsys):
    lora, parts, folder = export("sd3")
    whole, back = tmp_path / "whole", tmp_path / "back"
    assert run(capsys, lora, whole, "--merge", "--base", folder, "--dtype", "float32")[0] == 0
    code, text = run(capsys, whole, back, "--extract", folder, "--energy", 0.999999)
    assert code == 0, text
    assert "it reproduces 100.0% of the change in the transformer" in text
    found = LoraSource(back).layers["transformer"]
    assert {layer.rank for layer in found.values()} == {RANK}
    for name, layer in parts["transformer"].items():
        assert_close(found[name].delta(), layer.delta(), atol=1e-4, rtol=1e-3)
    assert not is_same_update(found, parts["transformer"], tolerance=1e-9)
    assert run(capsys, whole, tmp_path / "small", "--extract", folder, "--rank", 2)[0] == 0
    assert {layer.rank for layer in LoraSource(tmp_path / "small").layers["transformer"].values()} == {2}
    assert json.loads((back / "lora" / "adapter_config.json").read_text())["r"] == RANK
    change = torch.diag(torch.tensor([4.0, 3.0, 0.0]))
    assert [approximate_difference(change, None, energy)[0].rank for energy in (0.5, 0.9)] == [1, 2]


def test_diffusers_splits_the_fused_layers_of_kontext_at_the_released_width():
    draw, width, prefix = torch.Generator().manual_seed(3), 3072, "single_transformer_blocks.0"
    sizes = {"attn.to_q": 1, "attn.to_k": 1, "attn.to_v": 1, "proj_mlp": 4}
    layers = {
        f"{prefix}.{name}": LoraLayer(
            torch.randn(2, width, generator=draw), torch.randn(size * width, 2, generator=draw), 3.0
        )
        for name, size in sizes.items()
    }
    got = _convert_kohya_flux_lora_to_diffusers(kohya_tensors(layers, FluxKontext))
    for name, layer in layers.items():
        A, B = (got[f"transformer.{name}.lora_{matrix}.weight"] for matrix in "AB")
        assert_close(B @ A, layer.delta(), atol=1e-5, rtol=1e-5)


def test_names_of_layers_in_other_tools(export):
    for family, key in (
        ("sd3", "transformer.transformer_blocks.0.attn.add_q_proj"),
        ("wan21", "diffusion_model.blocks.0.cross_attn.o"),
        ("cosmos25", "diffusion_model.blocks.0.self_attn.output_proj"),
        ("sana", "diffusion_model.blocks.0.attn.qkv"),
        ("flux2", "diffusion_model.single_blocks.0.linear2"),
        ("flux_kontext", "transformer.single_transformer_blocks.0.attn.to_q"),
        ("qwen_image", "transformer.transformer_blocks.0.attn.add_q_proj"),
        ("z_image", "diffusion_model.layers.0.attention.qkv"),
    ):
        _, parts, folder = export(family)
        tensors = comfyui_tensors(parts["transformer"], registry.find_family(folder), None)
        assert {f"{key}.lora_A.weight", f"{key}.lora_B.weight", f"{key}.alpha"} <= tensors.keys()
    tensors = kohya_tensors(parts["transformer"], registry.find_family(folder))  # z_image: as in musubi-tuner
    names = [f"lora_unet_layers_0_attention_{layer}" for layer in ("to_q", "to_k", "to_v", "to_out_0")]
    assert {f"{name}.lora_down.weight" for name in names} <= tensors.keys()
