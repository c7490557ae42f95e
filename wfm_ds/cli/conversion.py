"""The work of `wfm convert`, which imports torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wfm_ds.checkpoint import checkpoint_weights, store
from wfm_ds.checkpoint.checkpoint_weights import CheckpointWeights, MergedAdapter
from wfm_ds.checkpoint.remote_store import open_locally
from wfm_ds.checkpoint.sharded_states import ShardedStates
from wfm_ds.checkpoint.store import Checkpoint
from wfm_ds.distributed.progress import show_wait
from wfm_ds.errors import ModelError, UserError
from wfm_ds.export import cosmos_actions
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.export.lora_base import base_weight_readers, denoiser_parts, read_lora
from wfm_ds.export.lora_extraction import extract_lora
from wfm_ds.export.lora_file import is_lora, iter_lora_tensors, lora_settings, read_base_model
from wfm_ds.export.lora_layouts import write_layout, write_peft
from wfm_ds.export.lora_settings import check_settings
from wfm_ds.export.pipeline_folder import INDEX_FILE
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import LORA_FOLDER, TensorSource, export_weights, new_export_folder, write_lora
from wfm_ds.memory.advice import explain_out_of_memory
from wfm_ds.storage import atomic

FILE_LAYOUTS = ("comfyui", "kohya")  # layouts with a single file instead of a folder
PICKLE_WARNING = (
    "is a DeepSpeed checkpoint of pickle files, which can execute arbitrary code; add --trust-pickle if you trust its "
    "source"
)


def run_conversion(args: argparse.Namespace) -> None:
    with open_locally(args.checkpoint, args.out.parent) as args.checkpoint:
        advice = explain_out_of_memory(torch.device("cpu"), lambda phase: memory_advice(args), lambda: None)
        with advice, show_wait(f"converting {args.checkpoint}"):
            message = convert_checkpoint(args)
        sys.stdout.write(message + "\n")


def memory_advice(args: argparse.Namespace) -> list[str]:
    merge = ["--merge (omit it: the LoRA alone is small)"] if args.merge else []
    is_deepspeed = checkpoint_weights.is_deepspeed_checkpoint(args.checkpoint)
    size = "all weights" if is_deepspeed else "the largest tensor of the model"
    return [*merge, f"to a machine with memory for {size} in float32"]


def convert_checkpoint(args: argparse.Namespace) -> str:
    source, out = args.checkpoint, args.out
    if out.resolve() == source.resolve() or source.resolve().is_relative_to(out.resolve()):
        raise ModelError(f"{out}: the export would replace its source; choose another folder")
    check_arguments(args)
    if args.extract is not None:
        return convert_extracted_lora(args)
    if (checkpoint := store.read_checkpoint(source)) is not None:
        is_plain = args.layout in (None, "diffusers") and not args.bake_alpha
        return export_run(checkpoint, args) if is_plain else convert_run_lora(checkpoint, args)
    if args.action_dim is not None or (source.suffix == ".pt" and source.is_file()):
        return write_action_pipeline(source, args)
    if (source / store.COMPLETE).exists():
        raise UserError(f"{source} is damaged: {store.find_flaw(source)}; choose another checkpoint")
    if checkpoint_weights.is_deepspeed_checkpoint(source):
        return export_deepspeed_checkpoint(source, args)
    if is_lora(source) or args.layout is not None:
        return convert_lora(source, args)
    raise UserError(
        f"{source} is not a checkpoint: expected checkpoints/step_N of a run, a LoRA, or a DeepSpeed checkpoint"
    )


def check_arguments(args: argparse.Namespace) -> None:
    if args.merge and (args.layout is not None or args.bake_alpha):
        raise UserError("--merge writes a whole pipeline: omit --layout and --bake-alpha")
    if args.layout in FILE_LAYOUTS and args.out.suffix != ".safetensors":
        raise UserError(f"{args.out}: layout {args.layout} needs a file name that ends with .safetensors")
    if args.layout in FILE_LAYOUTS and args.out.exists():
        raise UserError(f"{args.out} already exists: choose another name")
    if args.extract is None and (args.rank is not None or args.energy is not None):
        raise UserError("--rank and --energy need --extract BASE")
    if args.extract is not None and args.rank is None and args.energy is None:
        raise UserError("--extract BASE needs --rank R, --energy FRACTION, or both")
    if (args.rank is not None and args.rank < 1) or (args.energy is not None and not 0 < args.energy <= 1):
        raise UserError("--rank must be at least 1, and --energy above 0 and at most 1")


def convert_run_lora(checkpoint: Checkpoint, args: argparse.Namespace) -> str:
    with temporary_folder(args.out) as folder:
        plain = argparse.Namespace(**vars(args) | {"out": folder / "export", "layout": None, "bake_alpha": False})
        export_run(checkpoint, plain)
        return convert_lora(plain.out, args)


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic.temporary_folder(out.parent, ".wfm-convert-") as folder:
        yield folder


def export_run(checkpoint: Checkpoint, args: argparse.Namespace) -> str:
    with ShardedStates(checkpoint.path, checkpoint.world_size) as cuts:
        settings = read_export_settings(cuts)
        target = ExportTarget.from_json(settings)
        if args.base is not None:
            target = dataclasses.replace(target, base=args.base.absolute())
        weights = CheckpointWeights(cuts, target, settings["lora"])
        policy = choose_policy(weights, args.policy)
        source: TensorSource = weights
        if args.merge and settings["lora"] is None:
            raise UserError(f"{checkpoint.path} has full weights and no LoRA: omit --merge")
        if args.merge:
            source = MergedAdapter(weights, settings["lora"], target)
        return write_export(target, source, args, policy=policy, dtype=args.dtype or settings["dtype"])


def read_export_settings(cuts: ShardedStates) -> dict[str, Any]:
    """Return {name: value} of a checkpoint's export settings.

    Raises UserError if the setting base, parts, call, dtype or lora is missing.
    """
    settings: dict[str, Any] = cuts.read_metadata(0).export.model_dump(exclude_unset=True)
    if missing := sorted({"base", "parts", "call", "dtype", "lora"} - settings.keys()):
        raise UserError(
            f"{cuts.folder} lacks export settings ({', '.join(missing)}); resume its run, then convert a new checkpoint"
        )
    if settings["lora"] is not None:
        settings["lora"] = check_settings(settings["lora"], str(cuts.folder))
    return settings


def choose_policy(weights: CheckpointWeights, requested: str | None) -> str:
    policies, folder = weights.policy_names(), weights.sharded_states.folder
    if requested not in (None, *policies):
        raise UserError(f"{folder} has no policy {requested}; choose one of {', '.join(policies)}")
    return requested or ("ema" if "ema" in policies else "train")


def require_no_policy(policy: str | None, path: Path) -> None:
    if policy is not None:
        raise UserError(f"{path} has a single policy: omit --policy")


def require_float32(dtype: str | None) -> None:
    if dtype is not None:
        raise UserError("LoRAs are always written in float32: omit --dtype, or add --merge")


def write_action_pipeline(source: Path, args: argparse.Namespace) -> str:
    """source: NVIDIA's checkpoint or, with --action-dim, a Cosmos-Predict2.5 pipeline."""
    require_no_policy(args.policy, source)
    if args.merge or args.layout is not None or args.bake_alpha:
        raise UserError(f"{source} is not a LoRA: omit --merge, --layout and --bake-alpha")
    dtype = getattr(torch, args.dtype or "bfloat16")
    if args.action_dim is not None:
        if args.action_dim < 1 or args.base is not None:
            raise UserError("--action-dim must be at least 1, and CHECKPOINT is the base pipeline: omit --base")
        folder = cosmos_actions.add_action_layers(source.absolute(), args.out, args.action_dim, dtype)
    elif args.base is None:
        raise UserError(f"{source} has only the network: set --base to a folder of Cosmos-Predict2.5 of the same size")
    else:
        folder = cosmos_actions.convert_action_checkpoint(source, args.base.absolute(), args.out, dtype)
    return f"wrote {folder}; load it with:\n{loading_lines(folder, folder, lora=False)}"


def convert_lora(path: Path, args: argparse.Namespace) -> str:
    if path.resolve() == Path(args.checkpoint).resolve():  # not for an intermediate file
        require_no_policy(args.policy, path)
    layout: str = args.layout or "diffusers"
    if args.merge and args.base is None:
        raise UserError(f"{path} is a LoRA: --merge needs its base pipeline, set --base")
    base: Path | None = args.base and args.base.absolute()
    # Without --base, use the folder that the LoRA file names, if it contains a pipeline.
    if base is None and (recorded := read_base_model(path)) and (Path(recorded) / INDEX_FILE).is_file():
        base = Path(recorded)
    source, family = read_lora(path, base)
    target = None if args.base is None else ExportTarget(args.base.absolute(), source.parts)
    if args.merge and target is not None:
        merged = MergedAdapter(source, source.settings, target)
        return write_export(target, merged, args, policy="train", dtype=args.dtype or "bfloat16")
    require_float32(args.dtype)
    if layout in FILE_LAYOUTS:
        if family is None:
            raise UserError(f"{path}: the layer names match several model families; set --base")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        weight = None if base is None else base_weight_readers(base)
        files = write_layout(source, args.out, layout, family, bake_alpha=args.bake_alpha, weight=weight)
        return f"wrote {' and '.join(map(str, files))}: {source.summary()}, layout {layout} (verified by reading back)"
    if args.bake_alpha:
        source.bake_alpha()
    if layout == "peft":
        with new_export_folder(args.out, path) as folder:
            write_peft(source, folder)
        return f"wrote {args.out}: {source.summary()}, layout peft"
    if target is not None:
        return write_export(target, source, args, policy="train", dtype=None)
    with new_export_folder(args.out, path) as folder:
        tensors = [(part, source.part_tensors(part)) for part in source.parts]
        write_lora(tensors, source.settings, folder / LORA_FOLDER, shapes=None)
    return f"wrote the LoRA to {args.out / LORA_FOLDER}; its layers were not checked (set --base PIPELINE to check)"


def convert_extracted_lora(args: argparse.Namespace) -> str:
    trained, base = Path(args.checkpoint), args.extract.absolute()
    parts = denoiser_parts(base)
    extracts = {
        p: extract_lora(ExportTarget(trained, parts), ExportTarget(base, parts), p, args.rank, args.energy)
        for p in parts
    }
    layers = {part: result.layers for part, result in extracts.items()}
    settings = lora_settings(layers, {}, {"base_model_name_or_path": str(base)})
    with temporary_folder(args.out) as folder:
        tensors = [(part, iter_lora_tensors(part_layers, {})) for part, part_layers in layers.items()]
        write_lora(tensors, settings, folder / LORA_FOLDER, shapes=None)
        plain = argparse.Namespace(**vars(args) | {"base": base if args.layout in (None, "diffusers") else None})
        message = convert_lora(folder / LORA_FOLDER, plain)
    num_omitted = sum(len(result.skipped_tensors) for result in extracts.values())
    shares = " and ".join(
        f"{result.kept_fraction:.1%} of the change in the {part}" for part, result in extracts.items()
    )
    omitted = f"; it omits changes in {num_omitted} tensors outside linear layers" if num_omitted else ""
    return f"{message}\nit reproduces {shares}{omitted}"


def export_deepspeed_checkpoint(folder: Path, args: argparse.Namespace) -> str:
    if not args.trust_pickle:
        raise UserError(f"{folder} {PICKLE_WARNING}")
    require_no_policy(args.policy, folder)
    if args.base is None:
        raise UserError(f"{folder} does not record its base pipeline: set --base")
    if args.merge:
        raise UserError(f"{folder} is read as full denoiser weights: omit --merge")
    target = ExportTarget(args.base.absolute(), ("transformer",))
    weights = checkpoint_weights.DeepSpeedWeights(folder, target)
    return write_export(target, weights, args, policy="train", dtype=args.dtype or "float32")


def write_export(
    target: ExportTarget, source: TensorSource, args: argparse.Namespace, *, policy: str, dtype: str | None
) -> str:
    if source.uses_lora:
        require_float32(args.dtype)
    torch_dtype: torch.dtype = getattr(torch, dtype or "float32")
    folder = export_weights(target, source, args.out, policy=policy, dtype=torch_dtype, is_main=True)
    return f"exported the {policy} weights; load them with:\n{loading_lines(target.base, folder, source.uses_lora)}"
