"""Exports of a run: a LoRA or a pipeline folder that plain diffusers loads. Resumable state is not its business.

All ranks iterate the engine's stream, because each of its items is a gather; rank 0 writes. Whatever happens to rank
0's disk, it iterates to the end before it raises, so that no rank waits for a gather that never comes. The caller then
lets the ranks agree: `world.checked(lambda: export(...))`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.checkpoint.lora_layers import rank_of
from wfm_ds.checkpoint.pipeline_folder import CALL, components, read_index, share_unchanged
from wfm_ds.checkpoint.target import WEIGHTS, ExportTarget, call_json
from wfm_ds.checkpoint.tensor_file import Spec, TensorFile
from wfm_ds.errors import ModelError, UserError
from wfm_ds.models.hub import origin
from wfm_ds.models.variants import pipeline_variant
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

SHARD_BYTES = 1 << 30  # of one file
SAFETY_CHECKER = "safety_checker"
LORA_FOLDER = "lora"
LORA_FILES = {"transformer": "model.safetensors", "transformer_2": "model_2.safetensors"}  # by part of the denoiser
# Beside them, the layers that trained whole: diffusers refuses a LoRA file that has other tensors.
SAVED_FILES = {"transformer": "modules_to_save.safetensors", "transformer_2": "modules_to_save_2.safetensors"}
METADATA = "lora_adapter_metadata"  # of a file's header: where diffusers looks for alpha
LORA_PREFIX = "transformer"  # of the keys in both files: diffusers looks for no other one
LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB]|magnitude_vector)(\.weight)?")
SAVED_KEY = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<kind>[^.]+)")


class TensorSource(Protocol):
    """The part of an engine that an export needs."""

    lora: bool

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor | None]]:
        """Name and value of one tensor after the other; float32 on the CPU of rank 0, None on the others.

        LoRA: `transformer_blocks.0.attn.to_k.lora_A.weight`, without the adapter's name; `lora_magnitude_vector.weight`
        of DoRA, and `proj_out.modules_to_save.weight` of layers that train whole. Full: the names of the
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
    `shard_bytes`, one tensor at a time in memory, everything else shared with `target.base`. `out` is complete or
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
                adapters, folder = _by_part(_here(stream), target.parts), making / LORA_FOLDER
                write_lora(adapters, settings, folder, shapes=target.shapes, warn_idle=not trained_only)
                _write_call(target, folder)
            else:
                if not trained_only:
                    share_unchanged(target.base, making, changed=target.parts)
                    _write_call(target, making)
                _write_denoiser(target, _here(stream), making, dtype, shard_bytes, whole=not trained_only)
    finally:
        _exhaust(stream)
    log.log(logging.DEBUG if trained_only else logging.INFO, "exported the %s weights to %s", policy, result)
    return result


def _write_call(target: ExportTarget, folder: Path) -> None:
    """call.json, if what training depended on is not what the base folder says."""
    if target.call:
        (folder / CALL).unlink(missing_ok=True)  # it may be a link to the base model's
        (folder / CALL).write_text(call_json(target.base, target.call), encoding="utf-8")


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
    of_hub = origin(pipeline)
    arguments = [json.dumps(str(pipeline))]
    if of_hub is not None:
        arguments = [json.dumps(of_hub[0]), f'revision="{of_hub[1]}"']
    arguments += [f"{name}=None" for name in _must_be_declined(pipeline)]
    if variant := pipeline_variant(pipeline):
        arguments.append(f'variant="{variant}"')
    lines = ["from diffusers import DiffusionPipeline"]
    if _builds_checker(pipeline):
        lines.append(
            "# builds its safety checker, whose package must be installed, unless safety_checker=... is added:"
        )
    lines.append(f"pipe = DiffusionPipeline.from_pretrained({', '.join(arguments)})")
    if lora:
        name = json.dumps(str(exported))
        # Of a pipeline without a loader of its own the network has one, or is given it.
        has_loader = hasattr(_pipeline_class(read_index(pipeline)), "load_lora_weights")
        loader = "load_lora_weights" if has_loader else f"{LORA_PREFIX}.load_lora_adapter"
        if not has_loader and (network := _network_without_loader(pipeline)) is not None:
            lines.append("from diffusers.loaders import PeftAdapterMixin  # the network does not have it")
            both = f"(type(pipe.{LORA_PREFIX}), PeftAdapterMixin)"
            lines.append(f'pipe.{LORA_PREFIX}.__class__ = type("{network}", {both}, {{}})')
        for part, file in LORA_FILES.items():
            if (exported / file).exists():
                second = "" if part == LORA_PREFIX else f", load_into_{part}=True"
                lines.append(f'pipe.{loader}({name}, weight_name="{file}", adapter_name="default"{second})')
            if (exported / SAVED_FILES[part]).exists():
                whole = json.dumps(str(exported / SAVED_FILES[part]))
                lines.append("from safetensors.torch import load_file  # the layers that trained whole")
                lines.append(f"pipe.{part}.load_state_dict(load_file({whole}), strict=False)")
        if (exported / CALL).exists():
            lines.append(f"# it was trained with the call's arguments in {exported / CALL}")
    return "\n".join(lines)


def _network_without_loader(pipeline: Path) -> str | None:
    """Return the class of the pipeline's network, if it is one of diffusers that loads no LoRA."""
    import diffusers

    _, kind = components(read_index(pipeline)).get(LORA_PREFIX, (None, None))
    network = getattr(diffusers, str(kind), None)
    return kind if network is not None and not hasattr(network, "load_lora_adapter") else None


def _must_be_declined(pipeline: Path) -> list[str]:
    """Components that the index leaves out and diffusers misses nevertheless (SD3 without T5)."""
    index = read_index(pipeline)
    optional = getattr(_pipeline_class(index), "_optional_components", [])
    return [name for name, (_, kind) in components(index).items() if kind is None and name not in optional]


def _builds_checker(pipeline: Path) -> bool:
    """Return whether the pipeline makes a safety checker that the folder does not have (Cosmos-Predict2.5)."""
    index = read_index(pipeline)
    takes = inspect.signature(_pipeline_class(index)).parameters
    return SAFETY_CHECKER in takes and components(index).get(SAFETY_CHECKER, (None, None))[1] is None


def _pipeline_class(index: Mapping[str, Any]) -> Any:
    """Return the class that the index names; diffusers' base class if diffusers does not know it."""
    import diffusers

    return getattr(diffusers, str(index.get("_class_name")), diffusers.DiffusionPipeline)


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
        del tensor  # the next one is gathered meanwhile


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
    known = ("model_index.json", "config.json", "adapter_config.json", LORA_FOLDER)
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
    # A dropout there would stay on: PEFT's new layers are in train mode, beside a denoiser that is not.
    of_header = dict(settings) | {"modules_to_save": None, "lora_dropout": 0.0}
    metadata = {f"{LORA_PREFIX}.{key}": value for key, value in of_header.items()}
    header = {"format": "pt", METADATA: json.dumps(metadata, indent=2, sort_keys=True)}
    folder.mkdir()
    for part, tensors in adapters:
        held = {name: tensor.detach().to(torch.float32, copy=True).contiguous() for name, tensor in tensors}
        saved = {f"{m['module']}.{m['kind']}": held.pop(m[0]) for m in map(SAVED_KEY.fullmatch, list(held)) if m}
        adapter = {diffusers_name(name): tensor for name, tensor in held.items()}
        expected = None if shapes is None else shapes(part)
        check_adapter(adapter, expected, settings, warn_idle)
        check_saved(saved, expected)
        written = {LORA_FILES[part]: {f"{LORA_PREFIX}.{name}": value for name, value in adapter.items()}}
        for name, values in (written | ({SAVED_FILES[part]: saved} if saved else {})).items():
            save_file(values, folder / name, metadata=header if name in written else {"format": "pt"})
            atomic.sync(folder / name)
    atomic.write_text(folder / "adapter_config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")


def adapter_settings(config: Any, base: Path | str | None) -> dict[str, Any]:
    """A LoraConfig as JSON values. Its sets are sorted: their order changes from process to process."""
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {**settings, "base_model_name_or_path": None if base is None else str(base)}


def diffusers_name(name: str) -> str:
    """The name that diffusers looks for: it leaves out the `.weight` of a magnitude."""
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def adapter_shapes(weight: torch.Size, rank: int, *, dora: bool = False) -> dict[str, list[int]]:
    """Return the shapes of the two matrices on a layer with a weight of this shape, and of its magnitude."""
    outputs, *inputs = weight  # [out, in]; of a convolution [out, in, kh, kw], whose B is 1 x 1
    pair = {"A": [rank, *inputs], "B": [outputs, rank, *[1] * (len(inputs) - 1)]}
    return pair | ({"magnitude_vector": [outputs]} if dora else {})


def _implied_weight(pair: Mapping[str, Tensor]) -> torch.Size | None:
    """The shape of the layer that two matrices can only belong to; None if one of them is missing."""
    return torch.Size([len(pair["B"]), *pair["A"].shape[1:]]) if {"A", "B"} <= pair.keys() else None


def check_saved(saved: Mapping[str, Tensor], expected: Mapping[str, torch.Size] | None) -> None:
    """Every tensor of layers that trained whole must be one of the denoiser's. Raises ModelError."""
    for name, tensor in saved.items():
        if expected is not None and expected.get(name) != tensor.shape:
            raise ModelError(f"{name} {list(tensor.shape)} is no tensor of the denoiser: the export was given up")


def check_adapter(
    adapter: Mapping[str, Tensor],
    expected: Mapping[str, torch.Size] | None,
    settings: Mapping[str, Any],
    warn_idle: bool,
) -> None:
    """Every tensor must belong to a pair A, B that fits a weight of the bare denoiser, and have the rank that the
    settings give it. Raises ModelError."""
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
        rank = rank_of(settings, module)
        if weight is None or shapes != adapter_shapes(weight, rank, dora=bool(settings.get("use_dora"))):
            of = "no such layer" if weight is None else f"a layer {list(weight)}"
            raise ModelError(f"{module}: LoRA tensors {shapes} of rank {rank} do not fit {of}: the export was given up")
    if warn_idle and not any(bool(pair["B"].any()) for pair in pairs.values()):
        log.warning("all lora_B are zero: this adapter changes nothing (no optimizer step was applied yet?)")


def _write_denoiser(
    target: ExportTarget,
    stream: Iterator[tuple[str, Tensor]],
    pipeline_folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    *,
    whole: bool,
) -> None:
    """The parts of the denoiser of a full run: config, shards, and their index if there is more than one. Each tensor
    is written before the stream makes the next. whole: with the tensors that did not train, from the base."""
    missing: dict[str, Spec] = {}  # by their names in the stream
    with contextlib.ExitStack() as held:
        places: dict[str, tuple[TensorFile, str]] = {}
        for part in target.parts:
            folder, prefix = pipeline_folder / part, target.prefix(part)
            specs = {
                name: Spec(_stored(spec.dtype, dtype), spec.shape)
                for name, spec in target.specs(part).items()
                if whole or not target.is_frozen(name)
            }
            _begin_part(folder, target.config(part), shards := planned_shards(specs, shard_bytes))
            for file_name, shard in shards.items():
                file = held.enter_context(TensorFile(folder / file_name, shard, {"format": "pt"}))
                places |= {prefix + name: (file, name) for name in shard}
            missing |= {prefix + name: spec for name, spec in specs.items()}
        for name, tensor in stream:
            _check_expected(name, tensor, missing)
            file, own_name = places[name]
            file.write(own_name, tensor.to(missing.pop(name).dtype))
            del tensor  # the stream makes the next one meanwhile
        for part in target.parts if whole and target.frozen else ():
            stored, prefix = target.stored(part), target.prefix(part)
            for name in [name for name in missing if target.is_frozen(name.removeprefix(prefix))]:
                file, own_name = places[name]
                file.write(own_name, stored.tensor(own_name).to(missing.pop(name).dtype))
        if missing:
            raise ModelError(f"{len(missing)} tensors of the denoiser were not exported, e.g. {next(iter(missing))}")


def _begin_part(folder: Path, config: Mapping[str, Any], shards: Mapping[str, Mapping[str, Spec]]) -> None:
    """A part's folder with all but its weights."""
    folder.mkdir()
    atomic.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if len(shards) > 1:
        total = sum(spec.nbytes for shard in shards.values() for spec in shard.values())
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        atomic.write_text(folder / f"{WEIGHTS}.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _stored(own: torch.dtype, chosen: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the files: the chosen dtype, if it is one of floating point."""
    return chosen if own.is_floating_point else own


def planned_shards(specs: Mapping[str, Spec], shard_bytes: int, stem: str = WEIGHTS) -> dict[str, dict[str, Spec]]:
    """Distribute tensors over files, under the names that diffusers looks for: at most `shard_bytes` of tensors in
    each, in their order; a larger tensor fills a file alone."""
    shards: list[dict[str, Spec]] = [{}]
    held_bytes = 0
    for name, spec in specs.items():
        if shards[-1] and held_bytes + spec.nbytes > shard_bytes:
            shards.append({})
            held_bytes = 0
        shards[-1][name] = spec
        held_bytes += spec.nbytes
    count = len(shards)
    if count == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _check_expected(name: str, tensor: Tensor, missing: Mapping[str, Spec]) -> None:
    if name not in missing:
        raise ModelError(f"{name} is no tensor of the denoiser, or came twice: the export was given up")
    if tensor.shape != missing[name].shape:
        raise ModelError(f"{name} is {list(tensor.shape)}, the model has {list(missing[name].shape)}: given up")
