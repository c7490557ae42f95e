"""A run with DoRA, rsLoRA, dropout and modules_to_save: its export, conversion, loading in diffusers, `init_from`."""

import contextlib
import io
import json

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from commands import wfm_command
from folders import contents
from multi_rank.resuming import KINDS, settings, tiny_recipe, train_on_rank
from wfm_ds.export.loading_code import loading_lines

convert = wfm_command("convert")
SAVING = ["checkpoint.every=2", "run.steps=2", "algorithm.kl_beta=0.1"]


def pictures(folder):
    return [np.asarray(Image.open(path), dtype=int) for path in sorted(folder.glob("*.png"))]


def by_the_lines(base, export):
    """Execute the generated loading code and return its pipeline."""
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(loading_lines(base, export, lora=True), scope)
    return scope["pipe"]


def test_every_adapter_kind_exports_converts_and_resumes(two_ranks, tiny_pipelines, tmp_path):
    base, first = tiny_pipelines("sd3"), tmp_path / "first"
    arguments = settings("nft dora dropout zero2", first, model=base, digits="unused")
    two_ranks.run(train_on_rank, recipe=arguments["recipe"], overrides=[*arguments["overrides"], *SAVING])
    export = first / "safetensors" / "step_2"
    whole = load_file(export / "lora" / "modules_to_save.safetensors")
    assert set(whole) == {f"{layer}.{kind}" for layer in ("proj_out", "norm_out.linear") for kind in ("weight", "bias")}
    before = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all((tensor - before[name]).abs().max() > 1e-3 for name, tensor in whole.items())
    stored = json.loads((export / "lora" / "adapter_config.json").read_text())
    assert [stored[key] for key in ("use_dora", "use_rslora", "lora_dropout")] == [True, True, 0.2]

    assert convert([str(first / "checkpoints" / "step_2"), str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == contents(export)
    assert convert([str(export), str(tmp_path / "whole"), "--merge", "--base", str(base), "--dtype", "float32"]) == 0
    pipe, merged = (
        by_the_lines(base, export / "lora"),
        load_file(tmp_path / "whole" / "transformer" / "diffusion_pytorch_model.safetensors"),
    )
    draw = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, pipe.transformer.config.in_channels, 4, 4, generator=draw),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 5, pipe.transformer.config.joint_attention_dim, generator=draw),
        "pooled_projections": torch.randn(1, pipe.transformer.config.pooled_projection_dim, generator=draw),
    }
    with torch.no_grad():
        want = pipe.transformer(**inputs, return_dict=False)[0]
        pipe.unload_lora_weights()
        bare = pipe.transformer(**inputs, return_dict=False)[0]
        pipe.transformer.load_state_dict(merged)
        got = pipe.transformer(**inputs, return_dict=False)[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (want - bare).abs().max() > 1e-3

    going_on = [f"lora={KINDS}", f"lora.init_from={export}", "run.steps=1", "ema=null", "logging.console=false"]
    going_on += ["export.push_to_hub=somebody/mine", "export.every=each"]  # offline, this only logs a warning
    two_ranks.run(train_on_rank, **tiny_recipe("sd3_nft", tmp_path / "second", base, *going_on))
    ended, begun = (
        pictures(folder) for folder in (first / "samples" / "step_2", tmp_path / "second" / "samples" / "step_0")
    )
    assert len(ended) == len(begun) > 0
    assert max(np.abs(a - b).max() for a, b in zip(ended, begun, strict=True)) <= 1
