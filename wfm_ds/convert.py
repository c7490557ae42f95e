"""`python -m wfm_ds.convert`: a checkpoint to files that plain diffusers loads, and a LoRA from one tool's layout to
another's, offline and without a GPU.

Takes what a run saved (checkpoints/step_N, of any number of ranks and any ZeRO stage), a LoRA in the layout of
diffusers, PEFT, kohya or ComfyUI, a checkpoint of DeepSpeed's own, or a pipeline to extract a LoRA from. Exit codes: 0
done, 2 a wrong argument or input (one message), 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
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

LAYOUTS = ("diffusers", "comfyui", "kohya", "peft")
OF_FILES = ("comfyui", "kohya")  # layouts that are a file, not a folder
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
    p.add_argument("checkpoint", help="checkpoints/step_N of a run, a LoRA's folder or file, a pipeline; or s3://...")
    p.add_argument("out", type=Path, help="a new folder, or an export to replace; of kohya and comfyui a new file")
    p.add_argument("--policy", help="train, ema or old (default: ema if the run had one, else train)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="of a pipeline's denoiser (default: the run's)")
    p.add_argument("--merge", action="store_true", help="a whole pipeline, with the LoRA added to its weights")
    p.add_argument("--layout", choices=LAYOUTS, help="of a LoRA's keys (default: diffusers)")
    p.add_argument("--bake-alpha", action="store_true", help="multiply alpha / rank into B: no reader can miss it")
    p.add_argument("--extract", type=Path, metavar="BASE", help="the LoRA that makes BASE the pipeline CHECKPOINT")
    p.add_argument("--rank", type=int, help="of an extracted LoRA, at most")
    p.add_argument("--energy", type=float, help="share of each layer's squared change to extract, such as .99")
    p.add_argument("--base", type=Path, metavar="PIPELINE", help="the pipeline that was trained, if it has moved")
    p.add_argument("--trust-pickle", action="store_true", help="read a DeepSpeed checkpoint, which can run code")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.logs import quieten_libraries

    quieten_libraries()
    choose_accelerator()
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

    merged = ["--merge (leave it out: the LoRA alone is small)"] if args.merge else []
    whole = foreign.is_deepspeed(args.checkpoint)
    held = "all weights at once" if whole else "the largest tensor of the model"
    return [*merged, f"to a machine that holds {held} in float32"]


def convert(args: argparse.Namespace) -> str:
    """Export what args.checkpoint is, and return what to tell the user. Raises UserError."""
    from wfm_ds.checkpoint import foreign, store
    from wfm_ds.checkpoint.lora_file import is_lora

    source, out = args.checkpoint, args.out
    if out.resolve() == source.resolve() or source.resolve().is_relative_to(out.resolve()):
        raise ModelError(f"{out}: the export would replace what it is made from; choose another folder")
    check_words(args)
    if args.extract is not None:
        return extracted(args)
    if (found := store.read(source)) is not None:
        return (
            of_run(found, args) if args.layout in (None, "diffusers") and not args.bake_alpha else relaid(found, args)
        )
    if (source / store.COMPLETE).exists():
        raise UserError(f"{source} is damaged: {store.flaw(source)}; choose another checkpoint")
    if foreign.is_deepspeed(source):
        return of_deepspeed(source, args)
    if is_lora(source) or args.layout is not None:
        return of_lora(source, args)
    raise UserError(
        f"{source} is no checkpoint; name checkpoints/step_N of a run, a LoRA's folder or file, or DeepSpeed's own"
    )


def check_words(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that do not go together."""
    if args.merge and (args.layout is not None or args.bake_alpha):
        raise UserError("--merge writes a whole pipeline: leave --layout and --bake-alpha out")
    if args.layout in OF_FILES and args.out.suffix != ".safetensors":
        raise UserError(f"{args.out}: layout {args.layout} is a file; name one that ends with .safetensors")
    if args.layout in OF_FILES and args.out.exists():
        raise UserError(f"{args.out} is there already: choose another name")
    if args.extract is None and (args.rank is not None or args.energy is not None):
        raise UserError("--rank and --energy are for --extract BASE")
    if args.extract is not None and args.rank is None and args.energy is None:
        raise UserError("--extract BASE needs --rank R, --energy SHARE, or both")
    if (args.rank is not None and args.rank < 1) or (args.energy is not None and not 0 < args.energy <= 1):
        raise UserError("--rank is at least 1, and --energy above 0 and at most 1")


def relaid(found: Checkpoint, args: argparse.Namespace) -> str:
    """Export a run's LoRA, and write that in the layout asked for."""
    with beside(args.out) as making:
        plain = argparse.Namespace(**vars(args) | {"out": making / "export", "layout": None, "bake_alpha": False})
        of_run(found, plain)
        return of_lora(plain.out, args)


@contextlib.contextmanager
def beside(out: Path) -> Iterator[Path]:
    """Yield a folder on the disk of `out` that goes again."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".wfm-convert-") as making:
        yield Path(making)


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
        if args.merge:
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
        raise UserError(f"{where} holds all weights, no LoRA: leave --merge out")
    return settings


def require_no_choice(policy: str | None, where: Path) -> None:
    if policy is not None:
        raise UserError(f"{where} holds the weights of one policy: leave --policy out")


def require_float32(dtype: str | None) -> None:
    if dtype is not None:
        raise UserError("a LoRA is always written in float32: leave --dtype out, or add --merge")


def of_lora(path: Path, args: argparse.Namespace) -> str:
    from wfm_ds.checkpoint.export import LORA_FOLDER, new_export, write_lora
    from wfm_ds.checkpoint.lora_base import read_lora, weights_of
    from wfm_ds.checkpoint.lora_layouts import write_layout, write_peft
    from wfm_ds.checkpoint.offline import MergedAdapter
    from wfm_ds.checkpoint.target import ExportTarget

    if not is_of_run(path, args):
        require_no_choice(args.policy, path)
    layout: str = args.layout or "diffusers"
    if args.merge and args.base is None:
        raise UserError(f"{path} is a LoRA: name the pipeline that it is for by --base to merge it")
    base = base_folder(path, args)
    source, names = read_lora(path, base)
    target = None if args.base is None else ExportTarget(args.base.absolute(), source.parts)
    if args.merge and target is not None:
        merged = MergedAdapter(source, source.settings, target)
        return exported(target, merged, args, policy="train", dtype=args.dtype or "bfloat16")
    require_float32(args.dtype)
    if layout in OF_FILES:
        if names is None:
            raise UserError(f"{path}: layers of several families have these names: name the pipeline by --base")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        files = write_layout(
            source,
            args.out,
            layout,
            names,
            bake_alpha=args.bake_alpha,
            weight=None if base is None else weights_of(base),
        )
        return f"wrote {' and '.join(map(str, files))}: {source.described()}, layout {layout} (read back: equal)"
    if args.bake_alpha:
        source.bake_alpha()
    if layout == "peft":
        with new_export(args.out, path) as making:
            write_peft(source, making)
        return f"wrote {args.out}: {source.described()}, layout peft"
    if target is not None:
        return exported(target, source, args, policy="train", dtype=None)
    with new_export(args.out, path) as making:
        tensors = [(part, source.tensors(part)) for part in source.parts]
        write_lora(tensors, source.settings, making / LORA_FOLDER, shapes=None)
    return f"{args.out / LORA_FOLDER} holds the LoRA; its layers were not checked, --base PIPELINE would"


def is_of_run(path: Path, args: argparse.Namespace) -> bool:
    """True where `path` is what relaid or extracted have just written."""
    return path.resolve() != Path(args.checkpoint).resolve()


def base_folder(path: Path, args: argparse.Namespace) -> Path | None:
    """The pipeline that a LoRA is for: --base, or the folder that it says it was trained on, if that is here."""
    from wfm_ds.checkpoint.lora_file import stated_base
    from wfm_ds.checkpoint.pipeline_folder import INDEX

    if args.base is not None:
        return Path(args.base.absolute())
    stated = stated_base(path)
    return Path(stated) if stated is not None and (Path(stated) / INDEX).is_file() else None


def extracted(args: argparse.Namespace) -> str:
    """The LoRA that makes --extract BASE, as nearly as its rank allows, what CHECKPOINT is."""
    from wfm_ds.checkpoint.export import LORA_FOLDER, write_lora
    from wfm_ds.checkpoint.lora_base import denoiser_parts
    from wfm_ds.checkpoint.lora_extract import extract
    from wfm_ds.checkpoint.lora_file import named_tensors, settings_of
    from wfm_ds.checkpoint.target import ExportTarget

    trained, base = Path(args.checkpoint), args.extract.absolute()
    parts = denoiser_parts(base)
    found = {
        p: extract(ExportTarget(trained, parts), ExportTarget(base, parts), p, args.rank, args.energy) for p in parts
    }
    layers = {part: one.layers for part, one in found.items()}
    settings = settings_of(layers, {}, {"base_model_name_or_path": str(base)})
    with beside(args.out) as making:
        tensors = [(part, named_tensors(of_part, {})) for part, of_part in layers.items()]
        write_lora(tensors, settings, making / LORA_FOLDER, shapes=None)
        plain = argparse.Namespace(**vars(args) | {"base": base if args.layout in (None, "diffusers") else None})
        told = of_lora(making / LORA_FOLDER, plain)
    left_out = sum(len(one.left_out) for one in found.values())
    shares = " and ".join(f"{one.share:.1%} of what changed in the {part}" for part, one in found.items())
    without = f"; {left_out} tensors that are no linear layers changed too, and are not in it" if left_out else ""
    return f"{told}\nit has {shares}{without}"


def of_deepspeed(folder: Path, args: argparse.Namespace) -> str:
    from wfm_ds.checkpoint import foreign
    from wfm_ds.checkpoint.target import ExportTarget

    if not args.trust_pickle:
        raise UserError(f"{folder} {PICKLE}")
    require_no_choice(args.policy, folder)
    if args.base is None:
        raise UserError(f"{folder} does not say which pipeline was trained: name it by --base")
    if args.merge:
        raise UserError(f"{folder} is read as all weights of a denoiser: leave --merge out")
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
