"""Tiny runs that can be stopped after a step, and their bitwise comparison."""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent.parent
COLORS = ROOT / "recipes" / "prompts" / "colors"
STEPS = 4
COMMON = ["optimizer.lr=3e-2", f"run.steps={STEPS}", "logging.console=false", "engine.guard=true"]
# Decays and warm-up depend on the step, so that a counter restarted at 0 changes the result.
NFT = ["algorithm.old_decay={initial: 0.3, slope: 0.1, max: 0.9}", "optimizer.warmup_steps=3"]
SFT = ["optimizer.schedule=cosine", "validation.every=3", "validation.num_images=4", "data.max_bad_fraction=0.4"]
DDRL = ["algorithm.kl_beta=0.1", "algorithm.update_ref_every=3", "data.max_bad_fraction=0.4", "ema={decay: 0.9}"]
LORA, FULL = ["lora={rank: 4, alpha: 8}", "engine.deepspeed=zero2"], ["lora=null", "engine.deepspeed=zero3"]
KINDS = "{rank: 4, alpha: 8, dora: true, rslora: true, dropout: 0.2, modules_to_save: [proj_out, norm_out.linear]}"
CASES = {
    "nft lora zero2": ("sd3_nft", [*NFT, *LORA]),
    "nft full zero3": ("sd3_nft", [*NFT, *FULL]),
    "nft dora dropout zero2": ("sd3_nft", [*NFT, "engine.deepspeed=zero2", f"lora={KINDS}"]),
    "flow_grpo lora fp8 zero3": (
        "sd3_mix_grpo",
        [
            "algorithm.kl_beta=0.1",
            "optimizer.warmup_steps=3",
            "model.base_precision=fp8",
            *LORA,
            "engine.deepspeed=zero3",
        ],
    ),
    "flow_grpo full zero3": ("sd3_dance_grpo", ["algorithm.guard=true", *FULL]),
    "flow_dppo full zero2": ("sd3_flow_dppo", ["lora=null", "engine.deepspeed=zero2"]),
    "awm lora zero3": ("sd3_awm", ["lora={rank: 4, alpha: 8}", "engine.deepspeed=zero3"]),
    "ram lora zero2": ("sd3_ram", LORA),
    "dmd2 lora zero2": (
        "sd3_dmd2",
        [*LORA, "algorithm.fake={updates: 2, warmup_steps: 1}", "optimizer.schedule=cosine", "ema={decay: 0.9}"],
    ),
    "opd lora zero3": ("sd3_opd", ["lora={rank: 4, alpha: 8}", "engine.deepspeed=zero3"]),
    "ddrl lora zero2": ("sd3_ddrl", [*DDRL, *LORA]),
    "sft lora zero2": ("sd3_sft", [*SFT, *LORA]),
    "dpo lora zero2": ("sd3_dpo", [*SFT, *LORA, "algorithm.beta=50"]),
    "sft full zero3": ("sd3_sft", [*SFT, *FULL, "model.dtype=bfloat16"]),
}
if find_spec("bitsandbytes"):
    CASES["nft lora nf4 8-bit moments zero2"] = (
        "sd3_nft",
        [*NFT, *LORA, "lora.rank=32", "model.base_precision=nf4", "optimizer.name=adamw8bit"],
    )
    CASES["sft full 8-bit moments zero3"] = ("sd3_sft", [*SFT, *FULL, "optimizer.name=adamw8bit"])
if find_spec("torchao"):
    CASES["nft full float8 zero2"] = (
        "sd3_nft",
        [*NFT, "lora=null", "engine.deepspeed=zero2", "model.dtype=bfloat16", "model.fp8_training=torchao"],
    )


def train_on_rank(recipe, overrides, stop_at=None, save_at=None):
    """Train on this rank. SIGTERM arrives after step `stop_at`; rank 1 gets SIGUSR1 in step `save_at`."""
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.runs.shutdown import RunShutdown
    from wfm_ds.train import prepare_and_train

    class StopAt(StopFlag):
        """The run reads `is_set` exactly one time before each step."""

        def __init__(self):
            super().__init__()
            self.asked = 0

        @property
        def is_set(self):
            if self.asked == stop_at:
                self.raise_flag(signal.SIGTERM, None)
            self.asked += 1
            if self.asked == save_at and world.rank == 1:
                self.request_save(signal.SIGUSR1, None)
            return super().is_set

    world = World.join()
    loaded = recipe_file.load_recipe(Path(recipe), overrides)
    outcome, _ = prepare_and_train(loaded, world, StopAt(), RunShutdown(world))
    return {"status": outcome.status, "step": outcome.step, "metrics": dict(outcome.metrics)}


def train_with_own_code(recipe, overrides, folder, stop_at=None):
    """Call train_on_rank with `folder` on the Python path, so that it finds a model family or a reward there."""
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path), mock.patch.object(sys, "path", [folder, *sys.path]):
        return train_on_rank(recipe, overrides, stop_at=stop_at)


def tiny_recipe(name, folder, pipeline, *overrides, data=COLORS):
    """Return the arguments of `train_on_rank` for a tiny recipe that writes to `folder`."""
    places = [f"run.output_dir={folder}", f"model.path={pipeline}", f"data.path={data}"]
    return {"recipe": str(ROOT / "tests" / "recipes" / f"{name}.yaml"), "overrides": [*places, *overrides]}


def settings(case, folder, *, model, digits, changes=()):
    """Return the arguments of `train_on_rank` for one of CASES."""
    name, of_case = CASES[case]
    on_digits = {"sd3_sft": "images", "sd3_ddrl": "images", "sd3_dpo": "pairs.jsonl"}
    data = Path(digits) / on_digits[name] if name in on_digits else COLORS
    return tiny_recipe(name, folder, model, *COMMON, *of_case, *changes, data=data)


def records(folder):
    """Return the lines of metrics.jsonl without times, speeds and the durations of rewards."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time", "perf/samples", "perf/tflops", "perf/mfu", "perf/peak")
    return [{k: v for k, v in line.items() if not k.startswith(clocks) and "seconds" not in k} for line in lines]


def weights(folder, step):
    files = sorted((folder / "safetensors" / f"step_{step}").rglob("*.safetensors"))
    kept = [f for f in files if f.parent.name in ("lora", "transformer")]
    return {f"{f.parent.name}/{name}": tensor for f in kept for name, tensor in load_file(f).items()}


def assert_equal_runs(got, want, step=STEPS):
    assert records(got) == records(want)
    ours, theirs = weights(got, step), weights(want, step)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
