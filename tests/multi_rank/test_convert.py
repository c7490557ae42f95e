"""`wfm_ds.cli.convert` of checkpoints from two ranks writes the same files as the export of the run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import wfm_command
from folders import contents
from multi_rank.resuming import settings, tiny_recipe, train_on_rank
from multi_rank.training import small_sd3

convert = wfm_command("convert")
SAVING = ["checkpoint.every=1", "checkpoint.export_every=1", "run.steps=2"]
NFT = [
    ("nft lora zero2", ["engine.deepspeed=zero1", "model.dtype=bfloat16"]),
    ("nft full zero3", []),
    ("nft full zero3", ["engine.deepspeed=zero2", "ema=null", "model.dtype=bfloat16"]),
    ("nft lora zero2", ["engine.deepspeed=zero3", "ema=null"]),
]


def converted(checkpoint, out, *words):
    assert convert([str(checkpoint), str(out), *words]) == 0
    return contents(out)


@pytest.mark.parametrize(("case", "changes"), NFT)
@pytest.mark.ci_cases("nft lora zero2-changes0", "nft full zero3-changes1")
def test_a_converted_checkpoint_equals_the_export_of_the_run(case, changes, two_ranks, tiny_pipelines, tmp_path):
    arguments = settings(case, tmp_path / "run", model=tiny_pipelines("sd3"), digits="unused")
    two_ranks.run(train_on_rank, recipe=arguments["recipe"], overrides=[*arguments["overrides"], *SAVING, *changes])
    for step in (1, 2):
        got = converted(tmp_path / "run" / "checkpoints" / f"step_{step}", tmp_path / f"out_{step}")
        assert got == contents(tmp_path / "run" / "safetensors" / f"step_{step}")
    assert contents(tmp_path / "out_1") != contents(tmp_path / "out_2")


@pytest.mark.parametrize("lora", ["{rank: 4, alpha: 8}", "null"])
def test_both_experts_are_converted(lora, two_ranks, tiny_pipelines, digits, tmp_path):
    overrides = [f"lora={lora}", "logging.console=false", "validation.at_start=false", "validation.num_images=2"]
    model, words = tiny_pipelines("wan22"), [*overrides, "validation.num_prompts=1", *SAVING]
    two_ranks.run(train_on_rank, **tiny_recipe("wan22_sft_lora", tmp_path / "run", model, *words, data=digits))
    got = converted(tmp_path / "run" / "checkpoints" / "step_2", tmp_path / "out")
    assert got == contents(tmp_path / "run" / "safetensors" / "step_2")
    if lora != "null":
        merged = converted(tmp_path / "run" / "checkpoints" / "step_2", tmp_path / "merged", "--merge")
        assert Path("transformer_2", "diffusion_pytorch_model.safetensors") in merged


def saved_by_deepspeed(folder, stage, wrapped):
    """Train one step with plain DeepSpeed, save a DeepSpeed checkpoint, and return the gathered weights."""
    import deepspeed
    import torch
    from torch import nn

    from multi_rank.training import inputs
    from wfm_ds.distributed.world import World

    class Wrapper(nn.Module):
        def __init__(self, transformer):
            super().__init__()
            self.transformer = transformer

        def forward(self, **inputs):
            return self.transformer(**inputs)

    World.join()
    denoiser = small_sd3()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # True would make DeepSpeed replace torch's linear(), also for all later tests in these rank processes.
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
    }
    module = Wrapper(denoiser) if wrapped else denoiser
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]
    engine.backward(engine(**inputs([1]), return_dict=False)[0].square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(denoiser.parameters())):
        return {name: tensor.detach().clone() for name, tensor in denoiser.state_dict().items()}


@pytest.mark.parametrize(("stage", "wrapped"), [(2, False), (3, True)])
def test_a_deepspeed_checkpoint_is_converted_only_if_trusted(stage, wrapped, two_ranks, tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    (base / "model_index.json").write_text(
        '{"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}'
    )
    small_sd3().save_pretrained(base / "transformer")
    want, _ = two_ranks.run(saved_by_deepspeed, folder=str(tmp_path / "ds"), stage=stage, wrapped=wrapped)
    words = [str(tmp_path / "ds"), str(tmp_path / "out"), "--base", str(base)]
    assert convert(words) == 2
    assert "--trust-pickle" in capsys.readouterr().err
    assert convert([*words, "--trust-pickle"]) == 0
    got = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert any(not torch.equal(got[n], t) for n, t in small_sd3().state_dict().items())
    shutil.rmtree(tmp_path / "out")
    config = base / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dual_attention_layers": []}))
    assert convert([*words, "--trust-pickle"]) == 2
    assert (
        "transformer_blocks.0.norm1.linear.weight is [288, 32], but the model has [192, 32]" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
