"""`python -m wfm_ds.convert`: a checkpoint to files that plain diffusers loads, offline and without a GPU.

Takes what a run saved (checkpoints/step_N, of any number of ranks and any ZeRO stage), a LoRA folder of Cosmos-RL, or a
checkpoint of DeepSpeed's own. Exit codes: 0 done, 2 a wrong argument or input (one message), 1 anything else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.errors import ModelError, UserError
from wfm_ds.program import Parser, program

if TYPE_CHECKING:
    from wfm_ds.checkpoint.cuts import CutStates
    from wfm_ds.checkpoint.export import TensorSource
    from wfm_ds.checkpoint.offline import CheckpointWeights
    from wfm_ds.checkpoint.store import Checkpoint
    from wfm_ds.checkpoint.target import ExportTarget

PICKLE = (
    "is a DeepSpeed checkpoint: its files are pickles, which run the code of whoever wrote them; add --trust-pickle if "
    "that was you"
)


def parser() -> Parser:
    p = Parser(
        prog="python -m wfm_ds.convert",
        description="Write the weights of a checkpoint as a LoRA or a pipeline folder that plain diffusers loads.",
        epilog="Example: %(prog)s outputs/run/checkpoints/step_400 exported --policy train",
    )
    p.add_argument("checkpoint", help="checkpoints/step_N of a run, a LoRA folder, or DeepSpeed's own; or s3://...")
    p.add_argument("out", type=Path, help="a new folder, or an export to replace")
    p.add_argument("--policy", help="train, ema or old (default: ema if the run had one, else train)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="of a pipeline's denoiser (default: the run's)")
    p.add_argument("--merge-lora", action="store_true", help="a whole pipeline, with the LoRA added to its weights")
    p.add_argument("--base", type=Path, metavar="PIPELINE", help="the pipeline that was trained, if it has moved")
    p.add_argument("--trust-pickle", action="store_true", help="read a DeepSpeed checkpoint, which can run code")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.logs import quieten_libraries

    quieten_libraries()
    import torch

    from wfm_ds.checkpoint.remote import on_this_machine
    from wfm_ds.run.out_of_memory import explained

    with on_this_machine(args.checkpoint, args.out.parent) as args.checkpoint:
        with explained(torch.device("cpu"), lambda phase: lighter(args), lambda: None):
            told = convert(args)
        sys.stdout.write(told + "\n")


def lighter(args: argparse.Namespace) -> list[str]:
    """Name what to change where there is too little memory."""
    from wfm_ds.checkpoint import foreign

    merged = ["--merge-lora (leave it out: the LoRA alone is small)"] if args.merge_lora else []
    whole = foreign.is_deepspeed(args.checkpoint)
    held = "all weights at once" if whole else "the largest tensor of the model"
    return [*merged, f"to a machine that holds {held} in float32"]


def convert(args: argparse.Namespace) -> str:
    """Export what args.checkpoint is, and return what to tell the user. Raises UserError."""
    from wfm_ds.checkpoint import foreign, store

    source, out = args.checkpoint, args.out
    if out.resolve() == source.resolve() or source.resolve().is_relative_to(out.resolve()):
        raise ModelError(f"{out}: the export would replace what it is made from; choose another folder")
    if (found := store.read(source)) is not None:
        return of_run(found, args)
    if (source / store.COMPLETE).exists():
        raise UserError(f"{source} is damaged: {store.flaw(source)}; choose another checkpoint")
    if (folder := foreign.lora_folder(source)) is not None:
        return of_lora(folder, args)
    if foreign.is_deepspeed(source):
        return of_deepspeed(source, args)
    raise UserError(f"{source} is no checkpoint; name checkpoints/step_N of a run, a LoRA folder, or DeepSpeed's own")


def of_run(found: Checkpoint, args: argparse.Namespace) -> str:
    import dataclasses

    from wfm_ds.checkpoint.cuts import CutStates
    from wfm_ds.checkpoint.offline import CheckpointWeights, MergedAdapter
    from wfm_ds.checkpoint.target import ExportTarget

    with CutStates(found.path, found.world_size) as cuts:
        note = export_note(cuts)
        target = ExportTarget.of_json(note)
        if args.base is not None:
            target = dataclasses.replace(target, base=args.base.absolute())
        weights = CheckpointWeights(cuts, target, note["lora"])
        policy = chosen_policy(weights, args.policy)
        source: TensorSource = weights
        if args.merge_lora:
            source = MergedAdapter(weights, require_lora(note["lora"], found.path), target)
        return exported(target, source, args, policy=policy, dtype=args.dtype or note["dtype"])


def export_note(cuts: CutStates) -> dict[str, Any]:
    """Read the run's notes on its exports: base, parts and call of the pipeline, dtype, and the LoRA's settings."""
    from wfm_ds.checkpoint.state import EXPORT

    note: dict[str, Any] = cuts.plain(0).get(EXPORT, {})
    if lacking := sorted({"base", "parts", "call", "dtype", "lora"} - note.keys()):
        raise UserError(
            f"{cuts.folder} does not say what its weights are to be exported as ({', '.join(lacking)}): continue its "
            "run, and convert the checkpoint that it saves next"
        )
    return note


def chosen_policy(weights: CheckpointWeights, wanted: str | None) -> str:
    held = weights.policies()
    if wanted is None:
        return "ema" if "ema" in held else "train"
    if wanted not in held:
        raise UserError(f"{weights.cuts.folder} holds the weights {', '.join(held)}, not {wanted}: choose one of them")
    return wanted


def require_lora(settings: dict[str, Any] | None, where: Path) -> dict[str, Any]:
    if settings is None:
        raise UserError(f"{where} holds all weights, no LoRA: leave --merge-lora out")
    return settings


def require_no_choice(policy: str | None, where: Path) -> None:
    if policy is not None:
        raise UserError(f"{where} holds the weights of one policy: leave --policy out")


def require_float32(dtype: str | None) -> None:
    if dtype is not None:
        raise UserError("a LoRA is always written in float32: leave --dtype out, or add --merge-lora")


def of_lora(folder: Path, args: argparse.Namespace) -> str:
    from wfm_ds.checkpoint import foreign
    from wfm_ds.checkpoint.export import LORA_FOLDER, adapter_settings, new_export, write_lora
    from wfm_ds.checkpoint.offline import MergedAdapter
    from wfm_ds.checkpoint.target import ExportTarget

    require_no_choice(args.policy, folder)
    adapter = foreign.LoraFolder(folder)
    target = None if args.base is None else ExportTarget(args.base.absolute(), adapter.parts)
    if args.merge_lora:
        if target is None:
            raise UserError(f"{folder} is a LoRA: name the pipeline that it is for by --base to merge it")
        merged = MergedAdapter(adapter, adapter.settings, target)
        return exported(target, merged, args, policy="train", dtype=args.dtype or "bfloat16")
    require_float32(args.dtype)
    if target is not None:
        return exported(target, adapter, args, policy="train", dtype=None)
    settings = adapter_settings(adapter.lora_config(), adapter.base)
    with new_export(args.out, folder) as making:
        tensors = [(part, adapter.tensors(part)) for part in adapter.parts]
        write_lora(tensors, settings, making / LORA_FOLDER, shapes=None)
    return f"{args.out / LORA_FOLDER} holds the LoRA; its layers were not checked, --base PIPELINE would"


def of_deepspeed(folder: Path, args: argparse.Namespace) -> str:
    from wfm_ds.checkpoint import foreign
    from wfm_ds.checkpoint.target import ExportTarget

    if not args.trust_pickle:
        raise UserError(f"{folder} {PICKLE}")
    require_no_choice(args.policy, folder)
    if args.base is None:
        raise UserError(f"{folder} does not say which pipeline was trained: name it by --base")
    if args.merge_lora:
        raise UserError(f"{folder} is read as all weights of a denoiser: leave --merge-lora out")
    target = ExportTarget(args.base.absolute(), ("transformer",))
    weights = foreign.DeepSpeedWeights(folder, target)
    return exported(target, weights, args, policy="train", dtype=args.dtype or "float32")


def exported(
    target: ExportTarget, source: TensorSource, args: argparse.Namespace, *, policy: str, dtype: str | None
) -> str:
    import torch

    from wfm_ds.checkpoint.export import export, loading_lines

    if source.lora:
        require_float32(args.dtype)
    chosen: torch.dtype = getattr(torch, dtype or "float32")
    folder = export(target, source, args.out, policy=policy, dtype=chosen, is_main=True)
    return f"exported the {policy} weights; load them with:\n{loading_lines(target.base, folder, source.lora)}"


if __name__ == "__main__":
    sys.exit(main())
