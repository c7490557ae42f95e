"""What a run hands over: a LoRA or a pipeline folder that plain diffusers loads. Resumable state is not its business.

All ranks iterate the engine's stream, because each of its items is a gather; rank 0 writes. Whatever happens to rank
0's disk, it iterates to the end before it raises, so that no rank waits for a gather that never comes. The caller then
lets the ranks agree: `world.checked(lambda: export(...))`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds import atomic
from wfm_ds.checkpoint.pipeline_folder import CALL, components, read_index, share_unchanged
from wfm_ds.checkpoint.target import WEIGHTS, ExportTarget, call_json
from wfm_ds.errors import ModelError, UserError

log = logging.getLogger(__name__)

SHARD_BYTES = 1 << 30  # of one file, all of which is in memory while it is written
LORA_FOLDER = "lora"
LORA_FILES = {"transformer": "model.safetensors", "transformer_2": "model_2.safetensors"}  # by part of the denoiser
LORA_PREFIX = "transformer"  # of the keys in both files: diffusers looks for no other one
LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


class TensorSource(Protocol):
    """What an export asks of the engine."""

    lora: bool

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor | None]]:
        """Name and value of one tensor after the other; float32 on the CPU of rank 0, None on the others.

        LoRA: `transformer_blocks.0.attn.to_k.lora_A.weight`, without the adapter's name. Full: the names of the
        denoiser's state dict, persistent buffers included. With several experts the part that each belongs to stands
        before its name (`transformer_2.blocks.0...`). Collective: every rank must iterate to the end.
        """
        ...

    def lora_config(self) -> Any:
        """The peft.LoraConfig of the adapter, None in a full run."""
        ...


def export(
    target: ExportTarget,
    source: TensorSource,
    out: Path,
    *,
    policy: str,
    dtype: torch.dtype,
    is_main: bool,
    shard_bytes: int = SHARD_BYTES,
    trained_only: bool = False,
) -> Path:
    """Write the weights of `policy` in diffusers' format; every rank calls it, with the same arguments.

    A LoRA run gets `out/lora/model.safetensors` (always float32; for a second expert `model_2.safetensors` too) and
    `adapter_config.json`; a full run makes `out` a pipeline folder: the denoiser in `dtype`, in files of at most
    `shard_bytes` of which one at a time is in memory, everything else shared with `target.base`. `out` is complete or
    absent; an earlier export there is replaced. `trained_only`: a full run leaves out what training does not change, so
    that `out` is no pipeline; and an adapter that changes nothing is no news. Returns the LoRA folder or the pipeline
    folder. Raises UserError on rank 0 if the tensors are not those of the target, are not finite, or if `out` cannot be
    written.
    """
    result = out / LORA_FOLDER if source.lora else out
    stream = source.named_full_tensors(policy)
    if not is_main:
        _exhaust(stream)
        return result
    try:
        with new_export(out, target.base) as making:
            if source.lora:
                settings = adapter_settings(source.lora_config(), target.base)
                adapters = _by_part(_here(stream), target.parts)
                folder = making / LORA_FOLDER
                write_lora(adapters, settings, folder, shapes=target.shapes, warn_idle=not trained_only)
            else:
                if not trained_only:
                    _share_pipeline(target, making)
                for part, tensors in _by_part(_here(stream), target.parts):
                    _write_denoiser(target, part, tensors, making, dtype, shard_bytes)
    finally:
        _exhaust(stream)
    log.log(logging.DEBUG if trained_only else logging.INFO, "exported the %s weights to %s", policy, result)
    return result


def _share_pipeline(target: ExportTarget, making: Path) -> None:
    """All of the pipeline that training did not change."""
    share_unchanged(target.base, making, changed=target.parts)
    if target.call:
        (making / CALL).unlink(missing_ok=True)  # it may be a link to the base model's
        (making / CALL).write_text(call_json(target.base, target.call), encoding="utf-8")


@contextlib.contextmanager
def new_export(out: Path, base: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out`, which must not hold `base`. Raises UserError if that cannot be."""
    try:
        refuse_to_overwrite(out, base)
        with atomic.new_folder(out) as making:
            yield making
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise UserError(f"{out}: the export could not be written ({error}); free space or fix the folder") from error


def loading_lines(base: Path, exported: Path, lora: bool) -> str:
    """The Python lines with which a user loads what `export` returned, with diffusers alone.

    `base` is the pipeline folder that was trained. Raises ModelError if the folder has no readable index.
    """
    pipeline = base if lora else exported
    arguments = [json.dumps(str(pipeline)), *(f"{name}=None" for name in _must_be_declined(pipeline))]
    lines = [
        "from diffusers import DiffusionPipeline",
        f"pipe = DiffusionPipeline.from_pretrained({', '.join(arguments)})",
    ]
    if lora:
        name = json.dumps(str(exported))
        for part, file in LORA_FILES.items():
            if (exported / file).exists():
                second = "" if part == LORA_PREFIX else f", load_into_{part}=True"
                lines.append(f'pipe.load_lora_weights({name}, weight_name="{file}", adapter_name="default"{second})')
    return "\n".join(lines)


def _must_be_declined(pipeline: Path) -> list[str]:
    """Components that the index leaves out and diffusers misses nevertheless (SD3 without T5)."""
    import diffusers

    index = read_index(pipeline)
    pipeline_class = getattr(diffusers, str(index.get("_class_name")), None)
    optional = getattr(pipeline_class, "_optional_components", [])
    return [name for name, (_, kind) in components(index).items() if kind is None and name not in optional]


def _exhaust(stream: Iterator[tuple[str, Tensor | None]]) -> None:
    for _ in stream:
        pass


def _here(stream: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's view of the stream, each tensor checked: an empty one was not gathered, a NaN must not be shipped."""
    for name, tensor in stream:
        assert tensor is not None, f"rank 0 got nothing for {name}"
        if tensor.numel() == 0:
            raise ModelError(f"{name} is empty: its shards were not gathered, the export was given up")
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} holds NaN or infinity: the weights are broken, the export was given up")
        yield name, tensor


def _by_part(
    tensors: Iterator[tuple[str, Tensor]], parts: Sequence[str]
) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    """Each part of the denoiser with its tensors under their own names, in the order of the stream."""
    if len(parts) == 1:
        yield parts[0], tensors
        return
    missing = list(parts)
    for part, group in itertools.groupby(tensors, key=lambda item: item[0].split(".", 1)[0]):
        if part not in missing:
            raise ModelError(f"{part} is no part of the denoiser, or came twice: the export was given up")
        missing.remove(part)
        yield part, ((name.split(".", 1)[1], tensor) for name, tensor in group)
    if missing:
        raise ModelError(f"there were no tensors for {', '.join(missing)}: the export was given up")


def refuse_to_overwrite(out: Path, base: Path) -> None:
    """Raise ModelError if writing `out` would replace `base`, or something that is no export."""
    target, source = out.resolve(), base.resolve()
    if target == source or source.is_relative_to(target):
        raise ModelError(f"{out}: the export would replace the base model {base}; choose another folder")
    known = ("model_index.json", LORA_FOLDER)
    if out.exists() and any(out.iterdir()) and not any((out / name).exists() for name in known):
        raise ModelError(f"{out}: exists and is not an export; move it away or choose another folder")


def write_lora(
    adapters: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]],
    settings: Mapping[str, Any],
    folder: Path,
    *,
    shapes: Callable[[str], Mapping[str, torch.Size]] | None,
    warn_idle: bool = True,
) -> None:
    """The new folder of a LoRA that diffusers loads: the tensors of each part, and adapter_config.json.

    settings: of the LoraConfig, as JSON. shapes: of a part's state dict, which the tensors must fit; None: unknown.
    """
    # Without the prefix diffusers loads nothing, without this metadata alpha becomes the rank: both without a word.
    metadata = {f"{LORA_PREFIX}.{key}": value for key, value in settings.items()}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(metadata, indent=2, sort_keys=True)}
    folder.mkdir()
    for part, tensors in adapters:
        adapter = {name: tensor.detach().to(torch.float32, copy=True).contiguous() for name, tensor in tensors}
        _check_adapter(adapter, None if shapes is None else shapes(part), int(settings["r"]), warn_idle)
        file = folder / LORA_FILES[part]
        save_file({f"{LORA_PREFIX}.{name}": value for name, value in adapter.items()}, file, metadata=header)
        atomic.sync(file)
    atomic.write_text(folder / "adapter_config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")


def adapter_settings(config: Any, base: Path | str | None) -> dict[str, Any]:
    """A LoraConfig as JSON values. Its sets are sorted: their order changes from process to process."""
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {**settings, "base_model_name_or_path": None if base is None else str(base)}


def adapter_shapes(weight: torch.Size, rank: int) -> dict[str, list[int]]:
    """Of the two matrices on a layer with a weight of this shape."""
    outputs, *inputs = weight  # [out, in]; of a convolution [out, in, kh, kw], whose B is 1 x 1
    return {"A": [rank, *inputs], "B": [outputs, rank, *[1] * (len(inputs) - 1)]}


def _implied_weight(pair: Mapping[str, Tensor]) -> torch.Size | None:
    """The shape of the layer that two matrices can only belong to; None if one of them is missing."""
    return torch.Size([len(pair["B"]), *pair["A"].shape[1:]]) if len(pair) == 2 else None


def _check_adapter(
    adapter: Mapping[str, Tensor], expected: Mapping[str, torch.Size] | None, rank: int, warn_idle: bool
) -> None:
    """Every tensor must belong to a pair A, B that fits a weight of the bare denoiser. Raises ModelError."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        match = LORA_KEY.fullmatch(name)
        if match is None:
            raise ModelError(f"{name} is not the name of a LoRA tensor (MODULE.lora_A.weight): the export was given up")
        pairs.setdefault(match["module"], {})[match["matrix"]] = tensor
    if not pairs:
        raise ModelError("the adapter has no tensors: lora.target_modules matched no layer")
    for module, pair in pairs.items():
        shapes = {matrix: list(tensor.shape) for matrix, tensor in sorted(pair.items())}
        weight = _implied_weight(pair) if expected is None else expected.get(f"{module}.weight")
        if weight is None or shapes != adapter_shapes(weight, rank):
            of = "no such layer" if weight is None else f"a layer {list(weight)}"
            raise ModelError(f"{module}: LoRA tensors {shapes} of rank {rank} do not fit {of}: the export was given up")
    if warn_idle and not any(bool(pair["B"].any()) for pair in pairs.values()):
        log.warning("all lora_B are zero: this adapter changes nothing (no optimizer step was applied yet?)")


def _write_denoiser(
    target: ExportTarget,
    component: str,
    tensors: Iterator[tuple[str, Tensor]],
    pipeline_folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """One denoiser of a full run: config, shards, and their index if there is more than one."""
    folder = pipeline_folder / component
    folder.mkdir()
    shards = _write_shards(_checked_names(tensors, target.shapes(component)), folder, dtype, shard_bytes)
    files, count = {}, len(shards)
    for number, shard in enumerate(shards, start=1):
        name = f"{WEIGHTS}.safetensors" if count == 1 else f"{WEIGHTS}-{number:05d}-of-{count:05d}.safetensors"
        shard.path.rename(folder / name)
        files.update(dict.fromkeys(shard.names, name))
    if count > 1:
        index = {"metadata": {"total_size": sum(shard.tensor_bytes for shard in shards)}, "weight_map": files}
        atomic.write_text(folder / f"{WEIGHTS}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    atomic.write_text(folder / "config.json", json.dumps(target.config(component), indent=2) + "\n")
    atomic.sync(folder)


def _checked_names(
    tensors: Iterator[tuple[str, Tensor]], expected: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    missing = dict(expected)
    for name, tensor in tensors:
        if name not in missing:
            raise ModelError(f"{name} is no tensor of the denoiser, or came twice: the export was given up")
        if tensor.shape != missing.pop(name):
            raise ModelError(f"{name} is {list(tensor.shape)}, the model has {list(expected[name])}: given up")
        yield name, tensor
    if missing:
        raise ModelError(f"{len(missing)} tensors of the denoiser were not exported, e.g. {next(iter(missing))}")


class _Shard(NamedTuple):
    path: Path
    names: list[str]
    tensor_bytes: int


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, shard_bytes: int
) -> list[_Shard]:
    """Files of at most `shard_bytes` of tensors (a larger tensor fills one alone), in the order of the stream.

    Their final names contain their number, which is known at the end only.
    """
    written: list[_Shard] = []
    held: dict[str, Tensor] = {}
    held_bytes = 0

    def flush() -> None:
        path = folder / f"{WEIGHTS}-{len(written) + 1:05d}.part"
        save_file(held, path, metadata={"format": "pt"})
        atomic.sync(path)
        written.append(_Shard(path, list(held), held_bytes))
        held.clear()

    for name, tensor in tensors:
        # A copy: safetensors refuses views of one buffer, and the source may reuse its own.
        value = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        if held and held_bytes + value.nbytes > shard_bytes:
            flush()
            held_bytes = 0
        held[name] = value
        held_bytes += value.nbytes
    flush()
    return written
