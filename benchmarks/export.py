"""Time and memory of writing weights for diffusers: `python -m benchmarks.export [--layers 6]`.

Two ranks on a CPU hold a random SD3 transformer and AdamW moments at ZeRO-3 and save them with our checkpoint and with
DeepSpeed's. Then each conversion runs in a separate process, which reports its largest resident set (including mapped
files) and its processor time:

    convert      `wfm convert` of our checkpoint: one tensor in memory at a time
    deepspeed    DeepSpeed's zero_to_fp32 and diffusers' save_pretrained
    imports      no conversion: the libraries alone

The export of the live run is measured on rank 0, as the memory that it adds. If the exports do not contain the same
weights, the exit code is 1 and nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from wfm_ds.distributed.world import find_free_port

if TYPE_CHECKING:
    from wfm_ds.engine.engine import DenoiserEngine

RANKS = 2
EXPORTS = ("by_deepspeed", "by_convert", "live")
LIVE, SELF, SMALL_BUCKETS = "live.json", "self.json", "zero3_small_buckets.json"
HEADS = 24  # as in SD3.5 medium


def transformer_config(layers: int) -> dict[str, Any]:
    """Return the configuration of SD3.5 medium with fewer layers; 6 layers have half a billion parameters."""
    return {
        "num_layers": layers,
        "attention_head_dim": 64,
        "num_attention_heads": HEADS,
        "caption_projection_dim": 64 * HEADS,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 32,
        "qk_norm": "rms_norm",
    }


def write_base(folder: Path, layers: int) -> None:
    """Write a pipeline folder that contains only the transformer."""
    from diffusers import SD3Transformer2DModel

    folder.mkdir()
    index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    transformer = SD3Transformer2DModel(
        **transformer_config(layers)
    ).bfloat16()  # bfloat16 loads faster; training is in float32
    transformer.save_pretrained(folder / "transformer")


def num_parameters(layers: int) -> int:
    import torch
    from diffusers import SD3Transformer2DModel

    with torch.device("meta"):
        return sum(p.numel() for p in SD3Transformer2DModel(**transformer_config(layers)).parameters())


def save_checkpoints(folder: Path) -> None:
    """Run one rank: build the engine, export its weights, and save both checkpoints."""
    import torch
    from diffusers import SD3Transformer2DModel

    from wfm_ds.checkpoint import store
    from wfm_ds.checkpoint.rank_state import capture_state
    from wfm_ds.distributed.world import World
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.export.target import ExportTarget
    from wfm_ds.export.weights import export_weights
    from wfm_ds.recipe.schema import Recipe

    world = World.join()
    dtype = torch.bfloat16  # for computation; the float32 master weights are saved and exported
    denoiser = SD3Transformer2DModel.from_pretrained(
        folder / "base" / "transformer", low_cpu_mem_usage=True, torch_dtype=dtype
    )
    recipe = Recipe.model_validate(
        {
            "run": {"output_dir": str(folder), "steps": 1},
            "model": {"path": str(folder / "base"), "dtype": "bfloat16"},
            "engine": {"deepspeed": str(folder / SMALL_BUCKETS)},
            "data": {"kind": "paired", "path": "unused"},
            "sampling": {"height": 64, "width": 64},
            "algorithm": {"name": "sft"},
        }
    )
    engine = DenoiserEngine.build(
        denoiser, recipe, world, lora_targets=(), policies=frozenset(), accumulation=1, total_updates=1
    )
    fill_optimizer(engine)
    target = ExportTarget((folder / "base").absolute(), ("transformer",))
    before, began = resident_mib("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    export_weights(target, engine, folder / "live", policy="train", dtype=torch.float32, is_main=world.is_main)
    live = {"seconds": time.perf_counter() - began, "peak MiB": resident_mib("VmHWM") - before}

    def write_checkpoint(making: Path) -> list[Path]:
        with (folder / "turn").open("w") as turn:  # one rank at a time: two copies need too much memory for a laptop
            fcntl.flock(turn, fcntl.LOCK_EX)
            return capture_state(engine, {}, target, torch.float32).write_files(making)

    store.CheckpointSave(folder / "ours", 1, world, write_checkpoint, metadata={}, keep=1).commit()
    engine.ds.save_checkpoint(str(folder / "theirs"))
    if world.is_main:
        (folder / LIVE).write_text(json.dumps(live))


def fill_optimizer(engine: DenoiserEngine) -> None:
    """Create the state after a step: changed weights, and zero moments, which use no memory until they are written."""
    import numpy as np
    import torch

    for state, master in zip(engine.shards.optimizer_states(), engine.shards.master_weights(), strict=True):
        moments = {name: torch.from_numpy(np.zeros(len(master), np.float32)) for name in ("exp_avg", "exp_avg_sq")}
        state |= {"step": torch.tensor(1.0), **moments}
        master.mul_(1.01)


def write_small_buckets(file: Path, stage: int = 3) -> None:
    """Write a ZeRO configuration without the gigabytes of its default buckets."""
    elements = {"reduce_bucket_size": 2e7}
    if stage == 3:
        elements |= {"stage3_prefetch_bucket_size": 2e7, "stage3_max_live_parameters": 1e8}
        elements["sub_group_size"] = (
            5e7  # of the optimizer's steps, the first of which is taken when the engine is made
        )
    file.write_text(json.dumps({"zero_optimization": {"stage": stage, **elements}}))


def resident_mib(what: str) -> float:
    """Return the resident set of this process: the current one (VmRSS) or the largest so far (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def convert_with_deepspeed(folder: Path) -> None:
    """Convert a DeepSpeed checkpoint with DeepSpeed's tool."""
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel.from_config(SD3Transformer2DModel.load_config(folder / "base" / "transformer"))
    load_state_dict_from_zero_checkpoint(transformer, str(folder / "theirs"))
    transformer.save_pretrained(folder / "by_deepspeed" / "transformer", max_shard_size="5GB")


def convert_with_wfm(folder: Path) -> None:
    from wfm_ds.cli import convert

    if convert.main([str(folder / "ours" / "step_1"), str(folder / "by_convert")]):
        raise SystemExit(1)


def import_libraries(folder: Path) -> None:
    """Import the modules that both conversions import."""
    for name in ("wfm_ds.checkpoint.checkpoint_weights", "deepspeed", "diffusers.models.transformers.transformer_sd3"):
        importlib.import_module(name)


ROLES = {
    "rank": save_checkpoints,
    "deepspeed": convert_with_deepspeed,
    "convert": convert_with_wfm,
    "imports": import_libraries,
}


def start_child(role: str, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.export", "--role", role, "--folder", str(folder)]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=sys.stderr)


def save_on_all_ranks(folder: Path) -> None:
    everyone = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    port = str(find_free_port())
    ranks = [
        start_child("rank", folder, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port, **everyone)
        for rank in range(RANKS)
    ]
    if any([rank.wait() for rank in ranks]):  # a list: waits for all ranks, also after a failure
        raise SystemExit("a rank failed")


def measure_child(role: str, folder: Path) -> dict[str, float]:
    """Return the seconds of a child process and the usage that it reports. The child reports its own high-water mark,
    because ru_maxrss of a child includes the memory of its parent at the fork."""
    began = time.perf_counter()
    if start_child(role, folder).wait():
        raise SystemExit(f"{role} failed")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, **json.loads((folder / SELF).read_text())}


def write_own_usage(folder: Path) -> None:
    own = os.times()
    (folder / SELF).write_text(json.dumps({"processor s": own.user + own.system, "peak MiB": resident_mib("VmHWM")}))


def same_weights(folder: Path) -> bool:
    """Return whether all exports contain the same tensors, bit for bit."""
    with contextlib.ExitStack() as held:
        theirs, *ours = ([*sorted((folder / export / "transformer").glob("*.safetensors"))] for export in EXPORTS)
        want = open_tensors(theirs, held)
        return all(equal_files(want, open_tensors(files, held)) for files in ours)


def open_tensors(files: Sequence[Path], held: contextlib.ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor, by tensor name."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in (held.enter_context(safe_open(path, "pt")) for path in files):
        found |= dict.fromkeys(file.keys(), file)
    return found


def equal_files(want: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    import torch

    return want.keys() == got.keys() and all(
        torch.equal(file.get_tensor(name), got[name].get_tensor(name)) for name, file in want.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.export", description="Measure exports of a random model.")
    parser.add_argument("--layers", type=int, default=6, help="6 (default): half a billion parameters")
    parser.add_argument("--repeats", type=int, default=3, help="of each conversion, interleaved (default 3)")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role:
        ROLES[options.role](options.folder)
        if options.role != "rank":
            write_own_usage(options.folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="wfm-export-") as name:
        folder = Path(name)
        write_base(folder / "base", options.layers)
        write_small_buckets(folder / SMALL_BUCKETS)
        save_on_all_ranks(folder)
        runs: dict[str, list[dict[str, float]]] = {"convert": [], "deepspeed": [], "imports": []}
        for _ in range(options.repeats):
            for role, found in runs.items():
                found.append(measure_child(role, folder))
        if not same_weights(folder):
            sys.stderr.write("the exports differ; no result is written\n")
            return 1
        runs["export of the live run, added to rank 0"] = [json.loads((folder / LIVE).read_text())]
    parameters = num_parameters(options.layers)
    rows = [{"what": what, "parameters": parameters, **summarize_runs(found)} for what, found in runs.items()]
    sys.stdout.write(report.format_table(rows) + "\n")
    if not options.no_write:
        report.write_results("export", report.describe_machine(), rows)
    return 0


def summarize_runs(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        key: {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
        for key in runs[0]
        for values in [[run[key] for run in runs]]
    }


if __name__ == "__main__":
    sys.exit(main())
