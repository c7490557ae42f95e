"""Run every family through all GPU operations of a run: each tiny pipeline with each algorithm, ZeRO setting and world
size. New families with a tiny pipeline are included automatically."""

from __future__ import annotations

import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.rehearsal.fake_machine import fake_gpus
from benchmarks.rehearsal.record import Event, Record
from benchmarks.rehearsal.watch import DENOISE, MICRO_STEPS

if TYPE_CHECKING:
    from wfm_ds.training.diffusion_builder import DiffusionLoop as Loop

LORA = ("lora.rank=4", "lora.alpha=8")
FULL = ("lora=null",)
RL = ("rollout.prompts_per_step=2", "rollout.group_size={group}", "sampling.guidance_scale=2.0")
SFT = ("engine.gradient_accumulation=2", "validation.holdout=0.01", "validation.num_images=2")
UNPREPARED = ("data.cache_dir=null", "data.cache_text=off")  # captions are encoded when they are used


# Errors that come from a bug in the project or a gap in the rehearsal.
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class RehearsedRun:
    """One recipe of the tiny SD3, applied to another family: its loop, loss and solver."""

    name: str
    recipe: str
    config: str  # in ds_configs/
    overrides: tuple[str, ...]
    sequence_parallel: int = 1


# By number of ranks. Together they cover each algorithm and ZeRO setting, LoRA, all weights, and sequence parallelism.
RUNS: dict[int, tuple[RehearsedRun, ...]] = {
    2: (
        RehearsedRun("SFT", "sd3_sft_lora", "zero2", SFT + LORA + UNPREPARED),
        RehearsedRun("SFT", "sd3_sft", "zero3", SFT + FULL),
        RehearsedRun("NFT", "sd3_nft", "zero1", RL + LORA),
        RehearsedRun("NFT", "sd3_nft_full", "zero3_offload", RL + FULL),
        RehearsedRun("Flow-GRPO", "sd3_flow_grpo", "zero2", RL + LORA),
        RehearsedRun("Flow-GRPO-Fast", "sd3_flow_grpo_fast", "zero2", RL + FULL),
        RehearsedRun("DanceGRPO", "sd3_dance_grpo", "zero1", RL + FULL),
        RehearsedRun("DDRL", "sd3_ddrl", "zero3", (*RL[:2], *LORA)),
        RehearsedRun("NFT", "sd3_nft", "zero2", RL + LORA, sequence_parallel=2),
        RehearsedRun("AWM", "sd3_awm", "zero3", RL + FULL),
        RehearsedRun("RAM", "sd3_ram", "zero2", RL + LORA),
        RehearsedRun("DPO", "sd3_dpo", "zero3", SFT + FULL),
        RehearsedRun("DGPO", "sd3_dgpo", "zero1", RL + LORA),
    ),
    8: (
        RehearsedRun("SFT", "sd3_sft", "zero3", SFT + FULL, sequence_parallel=4),
        RehearsedRun("Flow-GRPO", "sd3_flow_grpo", "zero2", RL + LORA, sequence_parallel=2),
        RehearsedRun("DDRL", "sd3_ddrl", "zero2", ("rollout.prompts_per_step=1", "rollout.group_size={group}", *LORA)),
    ),
    64: (
        RehearsedRun("NFT", "sd3_nft_full", "zero3_hpz", RL + FULL),
        RehearsedRun("SFT", "sd3_sft_lora", "zero2", SFT + LORA, sequence_parallel=4),
    ),
}
# Family, ranks, and indices into RUNS of that number of ranks. Each family has an SFT and an RL run with 2 ranks, and a
# run with a node of 8 ranks (with sequence parallelism if possible); two families have a run with 64 ranks.
SELECTION = (
    *(("sana", 2, (0, 6, 10)), ("sana_video", 2, (0, 2)), ("wan22_ti2v", 2, (0, 3)), ("wan22", 2, (0, 4))),
    *(("sana", 8, (0, 2)), ("sana_video", 8, (1,)), ("wan22_ti2v", 8, (1,)), ("sana", 64, (1,))),
    *(
        ("flux2", 2, (0, 4)),
        ("cosmos3", 2, (0,)),
    ),  # without Qwen-Image and Z-Image, which select text states by a mask
    *(("sd3", 8, (1,)), ("cosmos25", 8, (0, 1)), ("wan21", 8, (0,)), ("wan22", 8, (1,)), ("digits", 8, (2,))),
    *(
        ("sd3", 2, (1, 7, 11)),
        ("cosmos25", 2, (0, 4)),
        ("digits", 2, (0, 5, 9, 12)),
        ("wan21", 2, (1, 8)),
        ("sd3", 64, (0,)),
    ),
)


def rehearse_runs(family: str, ranks: int, runs: Sequence[int]) -> list[dict[str, Any]]:
    """Run the given runs of this number of ranks with a tiny pipeline, one after another, because DeepSpeed keeps its
    process groups. Return a row for each."""
    with fake_gpus(world_size=ranks) as record:
        return [rehearse_run(family, ranks, RUNS[ranks][i], record) for i in runs]


def rehearse_run(family: str, ranks: int, run: RehearsedRun, record: Record) -> dict[str, Any]:
    from benchmarks.rehearsal.runs import open_loop
    from wfm_ds.errors import UserError

    events: list[Event] = []
    failure: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with open_loop(record, run.recipe, run_overrides(family, ranks, run, folder), folder) as loop:
                result = ", ".join(exercise_run(loop, record, events, folder))
        except UserError as error:
            result = f"refused: {error}"
        except ERRORS as error:  # the row reports it, and the other runs continue
            result = f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            failure.append(traceback.format_exc())
    counts = Counter((e.kind, e.window) for e in events)
    return {
        "family": family,
        "algorithm": run.name,
        "DeepSpeed": run.config,
        "weights": "full" if FULL[0] in run.overrides else "LoRA",
        "ranks": ranks,
        "sequence parallel": run.sequence_parallel,
        "rehearsed": result,
        "waits in the denoise loop": counts["sync", DENOISE],
        "waits between micro-steps": counts["sync", MICRO_STEPS],
        "blocking copies in the denoise loop": counts["copy", DENOISE],
        "blocking copies between micro-steps": counts["copy", MICRO_STEPS],
        "stacks": [*failure, *dict.fromkeys(f"{e.window}: {e.describe()}" for e in events)],
    }


def run_overrides(family: str, ranks: int, run: RehearsedRun, folder: Path) -> list[str]:
    """Return the overrides that change the recipe to this family, with samples and loss terms for every replica."""
    from benchmarks.rehearsal import runs
    from wfm_ds.models import registry

    base = registry.resolve_pipeline(f"tiny:{family}")
    call = json.loads((base / "call.json").read_text())
    # The default size of the pipeline, or a larger one that sequence parallelism can shard.
    size = [max(64 if run.sequence_parallel > 1 else 0, call[side]) for side in ("height", "width")]
    frames = call.get("num_frames", call.get("frames", 1))
    from_images = runs.image_folder(run.recipe) is not None
    replicas = ranks // run.sequence_parallel
    group = max(8, 2 * replicas)
    return [
        f"model.path=tiny:{family}",
        "model.dtype=bfloat16",
        *(["model.guardrail=off"] if registry.find_family(base).has_guardrail else []),
        f"engine.deepspeed={run.config}",
        f"engine.sequence_parallel={run.sequence_parallel}",
        "engine.micro_batch_size=2",
        "engine.max_forward_batch=4",
        f"sampling.height={size[0]}",
        f"sampling.width={size[1]}",
        f"sampling.num_frames={1 if from_images else frames}",
        *(["data.max_upscale=64"] if from_images else []),
        *(text.format(group=group) for text in run.overrides),
        *runs.data_overrides(run.recipe, folder),
    ]


def exercise_run(loop: Loop, record: Record, events: list[Event], folder: Path) -> Iterator[str]:
    """Train two steps, evaluate, sample, export and save a checkpoint. Yield the name of each completed operation.

    events: the blocking events of both windows (watch.py) are appended to this list, except those of the first step.
    """
    loop.start()
    loop.run_step()
    record.clear()
    loop.run_step()
    yield "training"
    events += [e for e in record.events if e.window and e.blocking]
    record.clear()
    loop.validator.evaluate(loop.step)
    yield "evaluation"
    yield from denoise_with_solvers(loop)
    events += [e for e in record.events if e.window and e.blocking]
    record.clear()
    loop.exporter.export_at_end(loop.step)
    yield "export"
    gather_publication(loop)
    yield "publication"
    restore_own_checkpoint(loop, folder)
    yield "checkpoint"


def denoise_with_solvers(loop: Loop) -> Iterator[str]:
    """Denoise a batch with every solver of the recipe schema, and encode the decoded samples."""
    import torch

    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.sampling.edm import Churn, make_edm_plan
    from wfm_ds.sampling.plan import rollout_plan

    job, seeds = loop.job, [1, 2]
    prompts = [loop.validator.items[0][0]] * 2  # a cached text, because the encoders may be removed
    grid = job.model.rollout_sigmas(job.recipe.sampling)
    for solver in get_args(SamplingRecipe.model_fields["solver"].annotation):
        settings = job.recipe.sampling.model_copy(update={"solver": solver, "window": None, "noise_level": None})
        if solver.startswith("edm"):
            churn = Churn.from_settings(settings.steps, s_churn=1.0, s_t_min=0.0, s_t_max=1e9, s_noise=1.0)
            plan: Any = make_edm_plan(solver, settings.steps, churn)
        else:
            plan = rollout_plan(settings, grid, run_seed=0, step=1, store_steps=settings.is_stochastic)
        with torch.no_grad():
            clean = job.sampler.generate("rollout", prompts, seeds, plan, seeds=seeds).clean_latents
        yield solver
    with torch.no_grad():
        again = job.model.encode_pixels(job.model.decode_latents(clean))
    assert again.shape == clean.shape
    yield "encoding of media"


def gather_publication(loop: Loop) -> None:
    """Gather all weights on this rank as for the publication of a fully trained model to rollout workers."""
    engine, model, rank = loop.job.engine, loop.job.model, loop.job.world.rank
    owners = {name: rank for name, _ in engine.iter_full_tensors("train")}
    for name, tensor in engine.iter_full_tensors("train", dtype=model.dtype, owners=owners):
        assert tensor is not None, name
        assert tensor.device.type == "cpu", name


def restore_own_checkpoint(loop: Loop, folder: Path) -> None:
    """Write the rank's state and restore it. With several ranks only this rank's files exist."""
    from wfm_ds.checkpoint.sharded_states import capture_state, restore_state
    from wfm_ds.export.target import ExportTarget

    engine, model = loop.job.engine, loop.job.model
    state = capture_state(engine, loop.state_dict(), ExportTarget.from_model(model), model.dtype)
    state.write_files(folder)
    if loop.job.world.size == 1:
        loop.load_state_dict(restore_state(engine, folder, 1))
    else:
        engine.restore_state(engine.step_counters(), engine.shard_states())
