"""Exports a run's weights as a LoRA or as a pipeline folder that diffusers loads. A run cannot resume from an export.

Only rank 0 writes. Call `world.run_checked(lambda: export_weights(...))`, so that the other ranks also raise rank 0's
errors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.errors import ModelError, UserError
from wfm_ds.export.lora_settings import layer_rank
from wfm_ds.export.pipeline_folder import (
    CALL_FILE,
    REPLACEABLE_CONFIGS,
    link_unchanged_files,
    replace_component,
    write_json,
)
from wfm_ds.export.target import WEIGHTS_STEM, ExportTarget
from wfm_ds.export.tensor_file import StoredTensorSpec, TensorFile
from wfm_ds.models.assets.loading import read_call_json
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

SHARD_BYTES = 1 << 30  # maximum bytes of one file
ADAPTER_CONFIG = "adapter_config.json"
LORA_FOLDER = "lora"
LORA_FILES = {"transformer": "model.safetensors", "transformer_2": "model_2.safetensors"}  # {component: LoRA file}
# Files of fully trained layers. They are separate, because diffusers rejects LoRA files that contain other tensors.
WHOLE_LAYER_FILES = {"transformer": "modules_to_save.safetensors", "transformer_2": "modules_to_save_2.safetensors"}
METADATA_KEY = "lora_adapter_metadata"  # key in a file's header where diffusers looks for alpha
LORA_PREFIX = "transformer"  # prefix of the keys in both files; diffusers accepts no other prefix
LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB]|magnitude_vector)(\.weight)?")
WHOLE_LAYER_KEY = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<kind>[^.]+)")


class TensorSource(Protocol):
    """Source of the tensors for an export, such as an engine or a checkpoint."""

    uses_lora: bool

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, tensor) for each tensor. All ranks must iterate to the end.

        Rank 0 gets float32 CPU tensors, and other ranks get None instead of a tensor.
        LoRA: names such as `transformer_blocks.0.attn.to_k.lora_A.weight` do not contain the adapter's name. DoRA adds
        `lora_magnitude_vector.weight`. Fully trained layers have names such as `proj_out.modules_to_save.weight`.
        Full training: names are those of the denoiser's state dict, including persistent buffers.
        In a two-expert model, each name starts with its component (`transformer_2.blocks.0...`).
        """
        ...

    def lora_config(self) -> Any:
        """Return the peft.LoraConfig of the adapter, or None after full training."""
        ...


class TensorPlace(NamedTuple):
    """The place of a tensor that is still to be written."""

    file: TensorFile
    name: str  # in the file
    spec: StoredTensorSpec

    def write(self, tensor: Tensor) -> None:
        self.file.write(self.name, tensor.to(self.spec.dtype))


class ShardedSource(Protocol):
    """Source of the tensors of a fully trained denoiser that delivers each tensor to one of the ranks."""

    def iter_full_tensors(
        self, policy: str, *, dtype: torch.dtype, owners: Mapping[str, int]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, tensor) for each tensor. All ranks must iterate to the end.

        The rank owners[name] gets a CPU tensor, and other ranks get None. Trained tensors have the dtype `dtype`.
        """
        ...


def export_weights(
    target: ExportTarget,
    source: TensorSource,
    out: Path,
    *,
    policy: str,
    dtype: torch.dtype,
    is_main: bool,
    shard_bytes: int = SHARD_BYTES,
    for_workers: bool = False,
) -> Path:
    """Write the weights of `policy` in diffusers' format. All ranks must call this with the same arguments.

    LoRA: writes `adapter_config.json` and `model.safetensors` (always float32) to `out/lora`. The LoRA of a second
    expert is written to `model_2.safetensors`.
    Full training: makes `out` a pipeline folder. The denoiser is stored in `dtype`, in files of at most `shard_bytes`
    bytes. All other files are hard links to the files in `target.base`, or copies. An earlier export is replaced. If
    writing fails, no incomplete `out` is left.
    for_workers: whether this is a publication of a LoRA, which may have no effect yet. Fully trained weights are
    published by `write_weight_files`.
    Returns the LoRA folder or the pipeline folder. Raises UserError on rank 0 if the tensors do not match the target or
    are not finite, or if `out` cannot be written.
    """
    result, replaced = out / LORA_FOLDER if source.uses_lora else out, target.replaced_configs
    stream = source.iter_full_tensors(policy)
    if not is_main:
        exhaust_stream(stream)
        return result
    try:
        with new_export_folder(out, target.base) as temporary:
            if source.uses_lora:
                settings = adapter_settings(source.lora_config(), target.base)
                adapters, folder = _group_by_part(check_tensors(stream), target.parts), temporary / LORA_FOLDER
                write_lora(adapters, settings, folder, shapes=target.tensor_shapes, warn_no_effect=not for_workers)
                _write_call_arguments(target, folder)
                for name, config in replaced.items():
                    write_json(folder / REPLACEABLE_CONFIGS[name], config)
            else:
                link_unchanged_files(target.base, temporary, changed=(*target.parts, *replaced))
                _write_call_arguments(target, temporary)
                for name, config in replaced.items():
                    replace_component(temporary, name, config)
                _write_denoiser(target, check_tensors(stream), temporary, dtype, shard_bytes)
    finally:
        exhaust_stream(stream)
    log.log(logging.DEBUG if for_workers else logging.INFO, "exported the %s weights to %s", policy, result)
    return result


def _write_call_arguments(target: ExportTarget, folder: Path) -> None:
    if target.call_arguments:
        # write_text replaces the file. If it is a hard link, the base model's call.json does not change.
        call = read_call_json(target.base) | dict(target.call_arguments)
        atomic.write_text(folder / CALL_FILE, json.dumps(call))


@contextlib.contextmanager
def new_export_folder(out: Path, base: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `out` at the end of the block. Raises UserError if writing fails.

    `out` must not contain `base`.
    """
    try:
        check_overwrite(out, base)
        with atomic.new_folder(out) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:  # SafetensorError: disk full
        raise UserError(f"{out}: the export could not be written ({error}); free space or fix the folder") from error


def exhaust_stream(stream: Iterator[tuple[str, Tensor | None]]) -> None:
    """Discard all remaining tensors of the stream. Otherwise, the ranks that gather them would hang."""
    for _ in stream:
        pass


def check_tensors(stream: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on rank 0. Raises ModelError if a tensor was not gathered or contains NaN or infinity."""
    for name, tensor in stream:
        assert tensor is not None, f"rank 0 received no tensor for {name}"
        require_finite(name, tensor)
        yield name, tensor
        del tensor  # free it before the next one is gathered


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise ModelError if a tensor is empty or contains NaN or infinity."""
    if tensor.numel() == 0:
        raise ModelError(f"{name} is empty because its shards were not gathered: export aborted")
    # A NaN is the minimum and the maximum. isfinite() of the whole tensor takes ten times as long.
    if tensor.is_floating_point() and not all(math.isfinite(bound) for bound in torch.aminmax(tensor)):
        raise ModelError(f"{name} contains NaN or infinity, so the weights are broken: export aborted")


def _group_by_part(
    tensors: Iterator[tuple[str, Tensor]], parts: Sequence[str]
) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    """Yield (denoiser component, its (name, tensor) pairs). The names do not start with the component's name.

    Raises ModelError for unknown, duplicate or missing components.
    """
    if len(parts) == 1:
        yield parts[0], tensors
        return
    missing = list(parts)
    for part, group in itertools.groupby(tensors, key=lambda item: item[0].split(".", 1)[0]):
        if part not in missing:
            raise ModelError(f"{part}: unexpected or duplicate part of the denoiser: export aborted")
        missing.remove(part)
        yield part, ((name.split(".", 1)[1], tensor) for name, tensor in group)
    if missing:
        raise ModelError(f"no tensors for {', '.join(missing)}: export aborted")


def check_overwrite(out: Path, base: Path) -> None:
    """Raise ModelError if writing `out` would replace `base` or a folder that is not an export."""
    target, source = out.resolve(), base.resolve()
    if target == source or source.is_relative_to(target):
        raise ModelError(f"{out}: the export would replace the base model {base}; choose another folder")
    export_files = ("model_index.json", "config.json", ADAPTER_CONFIG, LORA_FOLDER)
    if out.exists() and any(out.iterdir()) and not any((out / name).exists() for name in export_files):
        raise ModelError(f"{out} exists and is not an export; move it away or choose another folder")


def write_lora(
    adapters: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]],
    settings: Mapping[str, Any],
    folder: Path,
    *,
    shapes: Callable[[str], Mapping[str, torch.Size]] | None,
    warn_no_effect: bool = True,
) -> None:
    """Write a new LoRA folder for diffusers: one file per denoiser component, and adapter_config.json.

    adapters: pairs (component, (name, tensor) pairs of the component). settings: the peft.LoraConfig as JSON.
    shapes: function that maps a component to {name: shape} of its state dict, which the LoRA must fit. None: not
    checked.
    """
    # Without the prefix of the keys, diffusers silently loads nothing. Without this metadata, it silently uses the rank
    # as alpha. Dropout is set to 0, because it would be enabled after loading: PEFT creates layers in train mode even
    # if the denoiser is in eval mode.
    header_settings = dict(settings) | {"modules_to_save": None, "lora_dropout": 0.0, "base_model_name_or_path": None}
    metadata = {f"{LORA_PREFIX}.{key}": value for key, value in header_settings.items()}
    header = {"format": "pt", METADATA_KEY: json.dumps(metadata, indent=2, sort_keys=True)}
    folder.mkdir()
    for part, tensors in adapters:
        copies = {name: tensor.detach().to(torch.float32, copy=True).contiguous() for name, tensor in tensors}
        saved = {
            f"{m['module']}.{m['kind']}": copies.pop(m[0]) for m in map(WHOLE_LAYER_KEY.fullmatch, list(copies)) if m
        }
        adapter = {diffusers_name(name): tensor for name, tensor in copies.items()}
        expected = None if shapes is None else shapes(part)
        check_adapter(adapter, expected, settings, warn_no_effect)
        for name, tensor in saved.items():
            if expected is not None and expected.get(name) != tensor.shape:
                raise ModelError(f"{name} {list(tensor.shape)} does not match a tensor of the denoiser: export aborted")
        files = {LORA_FILES[part]: {f"{LORA_PREFIX}.{name}": value for name, value in adapter.items()}}
        for name, values in (files | ({WHOLE_LAYER_FILES[part]: saved} if saved else {})).items():
            save_file(values, folder / name, metadata=header if name in files else {"format": "pt"})
            atomic.sync_to_disk(folder / name)
    atomic.write_text(folder / ADAPTER_CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def adapter_settings(config: Any, base: Path | str | None) -> dict[str, Any]:
    """Return a LoraConfig as JSON values. Sets become sorted lists."""
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {**settings, "base_model_name_or_path": None if base is None else str(base)}


def diffusers_name(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def adapter_shapes(weight: torch.Size, rank: int, *, dora: bool = False) -> dict[str, list[int]]:
    """Return {name: shape} of the LoRA tensors for a weight of this shape: A, B and, with DoRA, the magnitudes."""
    outputs, *inputs = weight  # [out, in]; for a convolution [out, in, kh, kw], with a 1 x 1 B
    pair = {"A": [rank, *inputs], "B": [outputs, rank, *[1] * (len(inputs) - 1)]}
    return pair | ({"magnitude_vector": [outputs]} if dora else {})


def check_adapter(
    adapter: Mapping[str, Tensor],
    expected: Mapping[str, torch.Size] | None,
    settings: Mapping[str, Any],
    warn_no_effect: bool,
) -> None:
    """Raise ModelError if a LoRA layer is incomplete or does not fit the denoiser or the configured rank."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        match = LORA_KEY.fullmatch(name)
        if match is None:
            raise ModelError(f"{name} is not the name of a LoRA tensor (MODULE.lora_A.weight): export aborted")
        pairs.setdefault(match["module"], {})[match["matrix"]] = tensor
    if not pairs:
        raise ModelError("the adapter has no tensors: lora.target_modules matched no layer")
    for module, pair in pairs.items():
        shapes = {matrix: list(tensor.shape) for matrix, tensor in sorted(pair.items())}
        weight = None if expected is None else expected.get(f"{module}.weight")
        if expected is None and {"A", "B"} <= pair.keys():
            weight = torch.Size([len(pair["B"]), *pair["A"].shape[1:]])
        rank = layer_rank(settings, module)
        if weight is None or shapes != adapter_shapes(weight, rank, dora=bool(settings.get("use_dora"))):
            expected_layer = "any layer" if weight is None else f"a layer {list(weight)}"
            raise ModelError(
                f"{module}: LoRA tensors {shapes} of rank {rank} do not fit {expected_layer}: export aborted"
            )
    if warn_no_effect and not any(bool(pair["B"].any()) for pair in pairs.values()):
        log.warning("all lora_B are zero: this adapter has no effect (has an optimizer step been applied?)")


def _write_denoiser(
    target: ExportTarget,
    stream: Iterator[tuple[str, Tensor]],
    pipeline_folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write the denoiser components after full training: configs, weight files and, for several files, an index.

    Untrained tensors are read from the base folder.
    """
    missing: dict[str, TensorPlace] = {}  # {name in `stream`: where to write it}
    with contextlib.ExitStack() as stack:
        for part in target.parts:
            folder, prefix = pipeline_folder / part, target.tensor_prefix(part)
            specs = {
                name: StoredTensorSpec(file_dtype(spec.dtype, dtype), spec.shape)
                for name, spec in target.tensor_specs(part).items()
            }
            create_part_folder(folder, target.read_config(part), shards := plan_shards(specs, shard_bytes))
            for file_name, shard in shards.items():
                file = stack.enter_context(TensorFile(folder / file_name, shard, {"format": "pt"}))
                missing |= {prefix + name: TensorPlace(file, name, spec) for name, spec in shard.items()}
        for name, tensor in stream:
            require_expected(name, missing)
            if tensor.shape != (shape := missing[name].spec.shape):
                raise ModelError(f"{name} is {list(tensor.shape)}, but the model has {list(shape)}: export aborted")
            missing.pop(name).write(tensor)
            del tensor  # free it before the next one is created
        for part in target.parts if target.frozen else ():
            base_weights, prefix = target.base_weights(part), target.tensor_prefix(part)
            frozen = [n for n in missing if n.startswith(prefix) and target.is_frozen(n.removeprefix(prefix))]
            for name in frozen:
                missing.pop(name).write(base_weights.read_tensor(name.removeprefix(prefix)))
        require_complete(missing)


def create_part_folder(
    folder: Path, config: Mapping[str, Any], shards: Mapping[str, Mapping[str, StoredTensorSpec]]
) -> None:
    """Create the folder of a denoiser component with its config and, for several weight files, their index."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_shard_index(folder, shards, WEIGHTS_STEM)


def write_shard_index(folder: Path, shards: Mapping[str, Mapping[str, StoredTensorSpec]], stem: str) -> None:
    """Write STEM.safetensors.index.json if there are several weight files. shards: {file: {tensor: spec}}."""
    if len(shards) > 1:
        total = sum(spec.nbytes for shard in shards.values() for spec in shard.values())
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def file_dtype(dtype: torch.dtype, chosen: torch.dtype) -> torch.dtype:
    return chosen if dtype.is_floating_point else dtype


def plan_shards(
    specs: Mapping[str, StoredTensorSpec], shard_bytes: int, stem: str = WEIGHTS_STEM
) -> dict[str, dict[str, StoredTensorSpec]]:
    """Distribute tensors over files. Returns {file name in diffusers' scheme: {tensor name: spec}}.

    The tensors keep their order. Each file has at most `shard_bytes` bytes, unless it contains a single larger tensor.
    """
    shards: list[dict[str, StoredTensorSpec]] = [{}]
    held_bytes = 0
    for name, spec in specs.items():
        if shards[-1] and held_bytes + spec.nbytes > shard_bytes:
            shards.append({})
            held_bytes = 0
        shards[-1][name] = spec
        held_bytes += spec.nbytes
    return name_shards(shards, stem)


def name_shards(
    shards: Sequence[dict[str, StoredTensorSpec]], stem: str = WEIGHTS_STEM
) -> dict[str, dict[str, StoredTensorSpec]]:
    """Return {file name in diffusers' scheme: shard}."""
    count = len(shards)
    if count == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def require_complete(missing: Mapping[str, TensorPlace]) -> None:
    """Raise ModelError unless all tensors of the denoiser were written."""
    if missing:
        raise ModelError(f"{len(missing)} tensors of the denoiser were not exported, e.g. {next(iter(missing))}")


def require_expected(name: str, missing: Mapping[str, TensorPlace]) -> None:
    """Raise ModelError for the name of a tensor that is not in `missing`."""
    if name not in missing:
        raise ModelError(f"{name}: unexpected or duplicate tensor of the denoiser: export aborted")
