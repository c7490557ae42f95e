"""Assertions about the exports of a run: the files, and the pipelines that plain diffusers loads from them."""

import functools
import json

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from families import CASES, load_reference_pipeline, run_reference_pipeline
from wfm_ds.checkpoint.adapter_loading import load_part_adapter
from wfm_ds.models import registry
from wfm_ds.models.base import matches_any_pattern

EXPERTS = {"model.safetensors": "transformer", "model_2.safetensors": "transformer_2"}
# Buffers that are saved with the weights: SD3's position table, SANA-WM's recall gates.
CONSTANT = ("pos_embed.pos_embed", "*.recall_gate")


@functools.cache
def frozen(base, family):
    return registry.load_model(
        base, dtype=torch.float32, device="cpu", **CASES[family].load_options
    ).unused_parameter_patterns


def unreachable(name, base, family):
    """Return True if the gradient of a tensor, or of an adapter tensor's layer, is 0 up to rounding."""
    layer, adapter, _ = name.removeprefix("transformer.").partition(".lora_")
    by_rounding = any(layer in name for layer in CASES[family].zero_gradient_parameters)
    return by_rounding or matches_any_pattern(f"{layer}.weight" if adapter else name, frozen(base, family))


def adapters(folder):
    """Return {denoiser: adapter tensors} of a LoRA export."""
    files = {name: folder / "lora" / name for name in EXPERTS}
    return {EXPERTS[name]: load_file(file) for name, file in files.items() if file.exists()}


def denoisers(folder):
    """Return {denoiser: tensors} of a pipeline folder."""
    folders = {part: folder / part for part in EXPERTS.values()}
    return {part: load_file(f / "diffusion_pytorch_model.safetensors") for part, f in folders.items() if f.is_dir()}


def assert_trained(folder, base, family, more_than):
    """Assert that all trained tensors of every denoiser changed by more than `more_than`, and no other tensor did."""
    lora = (folder / "lora").is_dir()
    (assert_adapters_trained if lora else assert_denoisers_trained)(folder, base, family, more_than)


def assert_adapters_trained(folder, base, family, more_than):
    trained = adapters(folder)
    assert trained.keys() == denoisers(base).keys()
    for tensors in trained.values():
        up = {name: tensor for name, tensor in tensors.items() if "lora_B" in name}  # initialized to 0
        assert up
        assert len(tensors) == 2 * len(up)
        for name, tensor in up.items():
            assert tensor.abs().max() > more_than or unreachable(name, base, family), name


def assert_denoisers_trained(folder, base, family, more_than):
    before, after = denoisers(base), denoisers(folder)
    assert after.keys() == before.keys()
    for part, tensors in before.items():
        assert after[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            moved = (after[part][name] - tensor).abs().max()
            reached = moved > more_than or unreachable(name, base, family)
            assert (moved == 0) if matches_any_pattern(name, CONSTANT) else reached, name
    others = [f.relative_to(base) for f in base.rglob("*") if f.is_file() and f.parent.name not in before]
    assert all((folder / file).samefile(base / file) for file in others)


def loaded(folder, base, family):
    """Load the export with plain diffusers, using the two lines that users write."""
    if not (folder / "lora").is_dir():
        return load_reference_pipeline(folder, CASES[family])
    pipe = load_reference_pipeline(base, CASES[family])
    for file, part in EXPERTS.items():
        if (folder / "lora" / file).exists():
            load_part_adapter(pipe, part, folder / "lora" / file)
    return pipe


def assert_loads(folder, base, family):
    """Assert that the pipeline in plain diffusers has every exported tensor under its name."""
    pipe, lora = loaded(folder, base, family), (folder / "lora").is_dir()
    exported = adapters(folder) if lora else denoisers(folder)
    for part, tensors in exported.items():
        there = adapter_of(getattr(pipe, part)) if lora else getattr(pipe, part).state_dict()
        # For image-to-video Wan, diffusers adds zero adapters to layers that the LoRA does not contain.
        added = there.keys() - tensors.keys()
        assert lora or not added
        assert not any(there[name].any() for name in added if "lora_B" in name)
        assert all(torch.equal(there[name], tensor) for name, tensor in tensors.items())


def assert_draws(folder, base, family, *, frames, sample, steps, clip=None):
    """Assert that plain diffusers generates the trainer's sample from the export, and another sample from the base.

    The tolerance is one of 255 levels. frames: the trainer's sample, uint8 [H,W,3] or [T,H,W,3]; sample: its line in
    samples.jsonl; clip: uint8 [T,H,W,3], its first latent frame conditions both samples.
    """
    model = registry.load_model(base, dtype=torch.float32, device="cpu", **CASES[family].load_options)
    size = CASES[family].size
    grid = model.sigmas(steps, model.latent_shape(*size))

    def far(pipe):
        call = {"prompt": [sample["prompt"]], "generator": torch.Generator("cpu").manual_seed(sample["seed"])}
        if clip is not None:
            pixels = torch.from_numpy(clip).permute(3, 0, 1, 2)[None].float() / 255
            told, more = CASES[family].conditioning_frames_call(base, pixels, 1)
            told.register_modules(transformer=pipe.transformer)
            pipe, call = told, more | call
        call |= model.pipeline_call_kwargs(1.0, *size) | {"guider": model.guider_config(1.0), "output_type": "pt"}
        drawn = run_reference_pipeline(pipe, CASES[family], grid, **call)[0]
        shown = (255 * drawn.movedim(-4 if drawn.ndim == 4 else -3, -1)).round().to(torch.int16)
        assert shown.shape == frames.shape
        return (shown - torch.from_numpy(frames).to(torch.int16)).abs().max()

    from_export, from_base = far(loaded(folder, base, family)), far(load_reference_pipeline(base, CASES[family]))
    assert from_export <= 1 < from_base


def adapter_of(denoiser):
    tensors = get_peft_model_state_dict(denoiser, adapter_name="default")
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def assert_all_steps_taken(out, num_updates):
    """Assert that metrics.jsonl has `num_updates` applied steps, all with loss and gradient, and finite metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(None not in line.values() for line in lines)
    updates = [line for line in lines if "optim/skipped_steps" in line]
    assert [line["step"] for line in updates] == list(range(1, num_updates + 1))
    norms = [line.get("optim/grad_norm", line.get("optim/fake_grad_norm")) for line in updates]
    assert all(norm > 0 == line["optim/skipped_steps"] for norm, line in zip(norms, updates, strict=True))
    assert all(line.keys() & {"loss/total", "loss/fake", "sft/loss", "dpo/loss"} for line in updates)
