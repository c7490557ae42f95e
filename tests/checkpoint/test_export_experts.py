"""Exports of a denoiser with two experts: plain diffusers loads them and generates the same pixels."""

import os

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.testing import assert_close

from checkpoint.test_export import MAIN, Changed, plain, run_lines
from commands import wfm_command
from wfm_ds.errors import ModelError
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import export_weights
from wfm_ds.models import registry

convert = wfm_command("convert")
PARTS = ("transformer", "transformer_2")
CALL = {"num_inference_steps": 4, "guidance_scale_2": 3.0}  # the steps cover both experts, and each has its own scale


class Weights:
    """The trained tensors of a denoiser in one process, with the engine's names."""

    def __init__(self, module, *, lora):
        self.module, self.uses_lora = module, lora

    def lora_config(self):
        return self.module.peft_config["default"] if self.uses_lora else None

    def iter_full_tensors(self, policy):
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name.replace(".default.", "."), parameter.detach()


@pytest.fixture
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("wan22"), dtype=torch.float32, device="cpu")


def moved(model, *, lora):
    """Change every trained tensor of both experts, as training would."""
    if lora:
        model.denoiser.requires_grad_(False)
        config = LoraConfig(r=4, lora_alpha=9.0, target_modules=list(model.default_lora_targets))
        model.denoiser.add_adapter(config, adapter_name="default")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if parameter.requires_grad:
                parameter.add_((0.3 if lora else 0.05) * torch.randn(parameter.shape, generator=generator))
    return model.denoiser


def video(pipe, model):
    pipe.set_progress_bar_config(disable=True)
    call = {**model.pipeline_call_kwargs(2.0, 32, 32, 5), **CALL}
    return pipe("a red circle", generator=torch.Generator().manual_seed(11), output_type="pt", **call).frames


def test_plain_diffusers_loads_the_adapters_of_both_experts(model, tmp_path):
    before = video(model.pipeline, model)
    folder = export_weights(
        ExportTarget.from_model(model), Weights(moved(model, lora=True), lora=True), tmp_path / "step_3", **MAIN
    )
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "model.safetensors", "model_2.safetensors"]
    first, second = (load_file(folder / name) for name in ("model.safetensors", "model_2.safetensors"))
    assert first.keys() == second.keys()
    assert all(name.startswith("transformer.blocks.") for name in first)
    want = video(model.pipeline, model)
    pipe = run_lines(loading_lines(model.path, folder, lora=True))
    for part in PARTS:
        assert getattr(pipe, part).blocks[0].attn1.to_k.scaling["default"] == 9.0 / 4
    assert_close(video(pipe, model), want, atol=1e-5, rtol=0)
    assert (want - before).abs().max() > 1e-2

    only_first = plain(model.path)
    only_first.load_lora_weights(str(folder), weight_name="model.safetensors", adapter_name="default")
    assert (video(only_first, model) - want).abs().max() > 1e-3, "the second expert's adapter must have an effect"


def test_a_lora_folder_of_both_experts_is_converted_and_merged(model, tmp_path):
    folder = export_weights(
        ExportTarget.from_model(model), Weights(moved(model, lora=True), lora=True), tmp_path / "step_3", **MAIN
    )
    want = {name: load_file(folder / name) for name in ("model.safetensors", "model_2.safetensors")}
    base = ["--base", str(model.path)]
    for out, words in (("alone", []), ("checked", base)):
        assert convert([str(folder), str(tmp_path / out), *words]) == 0
        for name, tensors in want.items():
            got = load_file(tmp_path / out / "lora" / name)
            assert got.keys() == tensors.keys()
            assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
    assert convert([str(folder), str(tmp_path / "whole"), *base, "--merge", "--dtype", "float32"]) == 0
    assert_close(video(plain(tmp_path / "whole"), model), video(model.pipeline, model), atol=1e-5, rtol=0)


def test_plain_diffusers_loads_both_experts(model, tmp_path):
    before = video(model.pipeline, model)
    folder = export_weights(
        ExportTarget.from_model(model),
        Weights(moved(model, lora=False), lora=False),
        tmp_path / "step_3",
        **MAIN,
        shard_bytes=50_000,
    )
    assert_close(video(plain(folder), model), video(model.pipeline, model), atol=1e-5, rtol=0)
    assert (video(plain(folder), model) - before).abs().max() > 1e-2
    for part in PARTS:
        assert not {f.stat().st_ino for f in (folder / part).iterdir()} & {
            f.stat().st_ino for f in (model.path / part).iterdir()
        }
    for unchanged in ("vae/diffusion_pytorch_model.safetensors", "model_index.json"):
        assert (folder / unchanged).samefile(model.path / unchanged)
    again = registry.load_model(folder, dtype=torch.float32, device="cpu")
    for ours, its in zip(model.denoiser.state_dict().items(), again.denoiser.state_dict().items(), strict=True):
        assert ours[0] == its[0]
        assert torch.equal(ours[1], its[1])


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (True, "no tensors for transformer_2"),
        (False, r"tensors of the denoiser were not exported, e\.g\. transformer_2\."),
    ],
)
def test_an_export_without_the_second_expert_is_refused(model, tmp_path, lora, message):
    weights = Weights(moved(model, lora=lora), lora=lora)
    first = Changed(weights, lambda name, tensor: [(name, tensor)] if name.startswith("transformer.") else [])
    with pytest.raises(ModelError, match=message):
        export_weights(ExportTarget.from_model(model), first, tmp_path / "step_3", **MAIN)
    assert not (tmp_path / "step_3").exists()
