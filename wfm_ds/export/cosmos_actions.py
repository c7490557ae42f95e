"""Pipeline folders of Cosmos-Predict2.5 with actions, from NVIDIA's checkpoints or with untrained action layers.

The names of NVIDIA's layers are those of cosmos-predict2.5 (ActionChunkConditionedMinimalV1LVGDiT).
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.export.pipeline_folder import INDEX_FILE, link_unchanged_files, read_index, write_json
from wfm_ds.export.target import ExportTarget, FolderWeights
from wfm_ds.export.weights import export_weights
from wfm_ds.models.assets.loading import read_json
from wfm_ds.models.base import temporary_seed
from wfm_ds.models.cosmos25 import LORA_NAMES, Cosmos25
from wfm_ds.models.cosmos25_action_network import (
    ACTIONS_PER_LATENT,
    ActionTimeEmbedding,
    CosmosActionPipeline,
    CosmosActionTransformer3DModel,
)
from wfm_ds.models.lora_layer_names import LoraLayerName, LoraNameTable, map_layers
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import shorten_error

PART = "transformer"
PREFIX = "net."
UNUSED_PREFIXES = ("accum_", "pos_embedder.")  # counters of training, and tables that diffusers computes itself
UNUSED_SUFFIX = "._extra_state"  # of Transformer Engine
ACTION_WEIGHT = "action_embedder_B_D.fc1.weight"
SAME_SIZE = "choose a base pipeline of the same size"
BLOCK_LAYERS = {
    **{f"attn{i}.norm_{x}": f"{name}.{x}_norm" for i, name in ((1, "self_attn"), (2, "cross_attn")) for x in "qk"},
    **{
        f"norm{i}.linear_{k}": f"adaln_modulation_{name}.{k}"
        for i, name in ((1, "self_attn"), (2, "cross_attn"), (3, "mlp"))
        for k in (1, 2)
    },
}
OTHER_LAYERS = {
    "patch_embed.proj": "x_embedder.proj.1",
    "crossattn_proj.0": "crossattn_proj.0",
    "time_embed.norm": "t_embedding_norm",
    **{f"time_embed.t_embedder.linear_{k}": f"t_embedder.1.linear_{k}" for k in (1, 2)},
    **{f"time_embed.action_embedder.{i}": f"action_embedder_B_D.fc{k}" for i, k in ((0, 1), (2, 2))},
    **{f"time_embed.action_modulation.{i}": f"action_embedder_B_3D.fc{k}" for i, k in ((0, 1), (2, 2))},
    **{f"norm_out.linear_{k}": f"final_layer.adaln_modulation.{k}" for k in (1, 2)},
    "proj_out": "final_layer.linear",
}
LAYER_NAMES = LoraNameTable(
    (
        *LORA_NAMES,
        *map_layers("transformer_blocks.{}", "blocks.{}", BLOCK_LAYERS),
        *(LoraLayerName(name, original) for name, original in OTHER_LAYERS.items()),
    )
)


class NetworkTensors:
    """The tensors of a network as the source of an export."""

    uses_lora = False

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = tensors

    def lora_config(self) -> None:
        return None

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors


def convert_action_checkpoint(file: Path, base: Path, out: Path, dtype: torch.dtype) -> Path:
    """Write a pipeline folder with the network of NVIDIA's checkpoint `file` and the other files of `base`.

    base: folder of a Cosmos-Predict2.5 pipeline of the same size. dtype: of the network. Returns the folder.
    Raises ModelError if a file cannot be used, and UserError if `out` cannot be written.
    """
    tensors = read_action_checkpoint(file)
    hidden_size, inputs = tensors[ACTION_WEIGHT].shape
    if inputs % ACTIONS_PER_LATENT:
        raise ModelError(
            f"{file}: {ACTION_WEIGHT} has {inputs} columns, not a multiple of {ACTIONS_PER_LATENT}: only networks with "
            "four actions per latent frame are supported"
        )
    config = {"action_dim": inputs // ACTIONS_PER_LATENT, "action_hidden_size": hidden_size}
    with action_target(base, out, config) as target:
        network = NetworkTensors(rename_tensors(file, tensors, target.tensor_shapes(PART)).items())
        return export_weights(target, network, out, policy="train", dtype=dtype, is_main=True)


def add_action_layers(base: Path, out: Path, action_dim: int, dtype: torch.dtype) -> Path:
    """Write a copy of a Cosmos-Predict2.5 pipeline with untrained layers for `action_dim` numbers per action.

    Returns the folder. Raises as `convert_action_checkpoint`.
    """
    with action_target(base, out, {"action_dim": action_dim}) as target, temporary_seed(0):
        config, stored = target.read_config(PART), FolderWeights(base / PART)
        width = config["num_attention_heads"] * config["attention_head_dim"]
        layers = ActionTimeEmbedding(width, action_dim, 4 * width).state_dict()
        new = {f"time_embed.{name}": tensor for name, tensor in layers.items() if name.startswith("action_")}
        names = target.tensor_shapes(PART)
        network = NetworkTensors((name, new[name] if name in new else stored.read_tensor(name)) for name in names)
        return export_weights(target, network, out, policy="train", dtype=dtype, is_main=True)


@contextlib.contextmanager
def action_target(base: Path, out: Path, config: Mapping[str, int]) -> Iterator[ExportTarget]:
    """Yield a temporary pipeline folder with the files of `base`, except weights, and a network with actions.

    config: entries of the network's config. Raises ModelError if `base` is not a Cosmos-Predict2.5 pipeline.
    """
    index = read_index(base)
    if index.get("_class_name") not in Cosmos25.pipeline_classes:
        raise ModelError(f"{base} is a {index.get('_class_name')}; use a folder of {Cosmos25.pipeline_classes[0]}")
    network = CosmosActionTransformer3DModel
    stored: dict[str, Any] = read_json(base / PART / "config.json") | {"_class_name": network.__name__, **config}
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic.temporary_folder(out.parent, ".wfm-convert-") as folder:
        link_unchanged_files(base, folder / "base", changed=(PART,))
        index |= {"_class_name": CosmosActionPipeline.__name__, PART: [network.__module__, network.__name__]}
        write_json(folder / "base" / INDEX_FILE, index)
        (folder / "base" / PART).mkdir()
        write_json(folder / "base" / PART / "config.json", stored)
        yield ExportTarget(folder / "base", (PART,))


def read_action_checkpoint(file: Path) -> dict[str, Tensor]:
    """Return the weights in one of NVIDIA's checkpoints, by NVIDIA's names. They stay memory-mapped.

    The file is a pickle, but only tensors and bytes are read from it, so it cannot run code. Raises ModelError if it
    cannot be read or has no action layers.
    """
    try:
        with torch.serialization.safe_globals([io.BytesIO]):  # Transformer Engine's extra states
            states = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ModelError(f"{file}: cannot be read ({shorten_error(error)})") from error
    tensors: dict[str, Tensor] = {}
    for key, tensor in states.items() if isinstance(states, Mapping) else ():
        name = str(key).removeprefix(PREFIX)
        if isinstance(tensor, Tensor) and not name.startswith(UNUSED_PREFIXES) and not name.endswith(UNUSED_SUFFIX):
            tensors[name] = tensor
    if ACTION_WEIGHT not in tensors:
        raise ModelError(f"{file} has no {ACTION_WEIGHT}: only checkpoints of Cosmos-Predict2.5 with actions have it")
    return tensors


def rename_tensors(file: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return NVIDIA's tensors by the names of a network with these {name: shape}.

    file: named in errors. Raises ModelError for the first tensor that is missing, unexpected or of another shape.
    """
    rest, renamed = dict(tensors), {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        match = LAYER_NAMES.find_original(layer)
        original = name if match is None else f"{match[0]}.{kind}"
        tensor = rest.pop(original, None)
        if tensor is None:
            raise ModelError(f"{file} has no {original}; {SAME_SIZE}")
        if tensor.shape != shape:
            raise ModelError(
                f"{file}: {original} is {list(tensor.shape)}, but the base pipeline needs {list(shape)}; {SAME_SIZE}"
            )
        renamed[name] = tensor
    if rest:
        raise ModelError(f"{file}: unexpected tensor {min(rest)}; {SAME_SIZE}")
    return renamed
