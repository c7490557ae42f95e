"""What a run exported, as files and as plain diffusers loads it."""

import json

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from families import CASES, stock

EXPERTS = {"model.safetensors": "transformer", "model_2.safetensors": "transformer_2"}
CONSTANT = {"pos_embed.pos_embed"}  # SD3's table of positions, a buffer that is stored with the weights


def unreachable(name, family):
    return any(layer in name for layer in CASES[family].without_gradient)


def adapters(folder):
    """{denoiser: its adapter's tensors} of a LoRA export."""
    files = {name: folder / "lora" / name for name in EXPERTS}
    return {EXPERTS[name]: load_file(file) for name, file in files.items() if file.exists()}


def denoisers(folder):
    """{denoiser: its tensors} of a pipeline folder."""
    folders = {part: folder / part for part in EXPERTS.values()}
    return {part: load_file(f / "diffusion_pytorch_model.safetensors") for part, f in folders.items() if f.is_dir()}


def assert_trained(folder, base, family, more_than):
    """All that is trained moved by more than this, in every denoiser, and nothing else did."""
    lora = (folder / "lora").is_dir()
    (assert_adapters_trained if lora else assert_denoisers_trained)(folder, base, family, more_than)


def assert_adapters_trained(folder, base, family, more_than):
    trained = adapters(folder)
    assert trained.keys() == denoisers(base).keys()
    for tensors in trained.values():
        up = {name: tensor for name, tensor in tensors.items() if "lora_B" in name}  # 0 at first
        assert up
        assert len(tensors) == 2 * len(up)
        for name, tensor in up.items():
            assert tensor.abs().max() > more_than or unreachable(name, family), name


def assert_denoisers_trained(folder, base, family, more_than):
    before, after = denoisers(base), denoisers(folder)
    assert after.keys() == before.keys()
    for part, tensors in before.items():
        assert after[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            moved = (after[part][name] - tensor).abs().max()
            assert (moved == 0) if name in CONSTANT else (moved > more_than or unreachable(name, family)), name
    others = [f.relative_to(base) for f in base.rglob("*") if f.is_file() and f.parent.name not in before]
    assert all((folder / file).samefile(base / file) for file in others)


def assert_loads(folder, base, family):
    """Plain diffusers has every exported tensor at its place."""
    if (folder / "lora").is_dir():
        exported, pipe = adapters(folder), stock(base, CASES[family])
        for file, part in EXPERTS.items():
            if part in exported:
                options = {} if part == "transformer" else {f"load_into_{part}": True}
                pipe.load_lora_weights(folder / "lora", weight_name=file, adapter_name="default", **options)
        loaded = {part: adapter_of(getattr(pipe, part)) for part in exported}
    else:
        exported, pipe = denoisers(folder), stock(folder, CASES[family])
        loaded = {part: getattr(pipe, part).state_dict() for part in exported}
    for part, tensors in exported.items():
        assert loaded[part].keys() == tensors.keys()
        assert all(torch.equal(loaded[part][name], tensor) for name, tensor in tensors.items())


def adapter_of(denoiser):
    tensors = get_peft_model_state_dict(denoiser, adapter_name="default")
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def assert_all_steps_taken(out, num_updates):
    """So many optimizer steps, none skipped, each with a loss and a gradient; metrics that are not finite are null."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(None not in line.values() for line in lines)
    updates = [line for line in lines if "optim/lr" in line]
    assert [line["step"] for line in updates] == list(range(1, num_updates + 1))
    assert all(line["optim/grad_norm"] > 0 == line["optim/skipped_steps"] for line in updates)
    assert all(line.keys() & {"loss/total", "sft/loss"} for line in updates)
