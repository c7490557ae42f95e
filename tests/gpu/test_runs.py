"""Whole tiny runs on the device: bitwise resume, a rollout worker on the same device, and an export for diffusers."""

import json

import pytest

from multi_rank.resuming import records, tiny_recipe, weights

RESUMABLE = ["run.steps=4", "optimizer.lr=3e-2", "checkpoint.every=1", "checkpoint.export_every=4"]
DETERMINISTIC = "engine.deterministic=true"


def interrupted(train, tmp_path, *overrides):
    """Train 4 steps without interruption, and again with a resume after step 2. Return both folders."""
    assert train("whole", "sd3_nft", *RESUMABLE, *overrides)["status"] == "finished"
    assert train("parts", "sd3_nft", *RESUMABLE, *overrides, stop_at=2)["status"] == "preempted"
    assert train("parts", "sd3_nft", *RESUMABLE, *overrides)["step"] == 4
    return tmp_path / "whole", tmp_path / "parts"


def test_a_deterministic_run_resumes_bit_by_bit(train, tmp_path):
    import torch

    whole, parts = interrupted(train, tmp_path, DETERMINISTIC)
    assert records(parts) == records(whole)
    one, other = weights(whole, 4), weights(parts, 4)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_determinism_a_run_resumes_up_to_rounding(train, tmp_path):
    """Resumed metrics match up to rounding, because attention's backward pass may sum in a different order."""
    whole, parts = interrupted(train, tmp_path)
    for got, want in zip(records(parts), records(whole), strict=True):
        assert got.keys() == want.keys()
        for tag in want.keys() & {"loss/total", "reward/total/mean", "optim/lr"}:
            assert got[tag] == pytest.approx(want[tag], rel=1e-2, abs=1e-3), tag


def test_a_worker_on_the_trainers_own_device(train, tmp_path, device):
    place = "cuda:0" if device == "cuda" else "cpu"
    mode = ["rollout.mode=async", "rollout.max_staleness=0", "rollout.spawn=1", f"rollout.devices=[{place}]"]
    ended = train("async", "sd3_nft", "run.steps=2", "validation.num_prompts=1", *mode)
    assert (ended["status"], ended["step"]) == ("finished", 2)
    lines = [json.loads(line) for line in (tmp_path / "async" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout/workers" in line]
    assert [(s["rollout/workers"], s["rollout/samples"]) for s in steps] == [(1, 8)] * 2


def pictures(pipeline, adapter, device):
    """Load an exported LoRA with diffusers on the device, and return the images of one call."""
    import torch
    from diffusers import DiffusionPipeline

    stock = DiffusionPipeline.from_pretrained(pipeline, local_files_only=True).to(device)
    stock.load_lora_weights(adapter)
    stock.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
    generator = torch.Generator("cpu").manual_seed(0)
    return stock("a red circle", output_type="pt", generator=generator, **size).images.float().cpu()


def test_plain_diffusers_loads_the_export_on_the_device(train, there, on_cpu, device, tmp_path, tiny_pipelines):
    assert train("run", "sd3_nft", *RESUMABLE)["status"] == "finished"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    settings = {"pipeline": str(tiny_pipelines("sd3")), "adapter": result["artifacts"]["lora"]}
    found, expected = there(pictures, device=device, **settings), on_cpu(pictures, device="cpu", **settings)
    assert found.shape == (1, 3, 32, 32)
    assert float((found - expected).abs().max()) < 1e-2


def ending(recipe, overrides):
    """Train with a denoiser that allocates too much memory in training. Return the error message."""
    import torch

    from multi_rank.resuming import train_on_rank
    from wfm_ds.errors import UserError
    from wfm_ds.models.sd3 import StableDiffusion3

    denoise = StableDiffusion3.denoise

    def hungry(self, latents, *rest):
        if torch.is_grad_enabled():
            torch.empty(2**50, dtype=torch.uint8, device=latents.device)
        return denoise(self, latents, *rest)

    StableDiffusion3.denoise = hungry
    try:
        return train_on_rank(recipe, overrides)
    except UserError as error:
        return str(error)
    finally:
        StableDiffusion3.denoise = denoise


def test_out_of_memory_is_one_sentence_with_the_phase_and_keys_to_lower(there, tiny_pipelines, tmp_path, device):
    quiet = ["run.steps=1", "validation.at_start=false", "logging.tensorboard=false", "logging.console=false"]
    said = there(ending, **tiny_recipe("sd3_nft", tmp_path / "out", tiny_pipelines("sd3"), *quiet))
    assert said.startswith(f"out of memory on {device}")
    assert " in phase train: requested 1048576.0 GiB more, " in said
    assert "; change model.gradient_checkpointing: true, or engine.micro_batch_size below " in said
