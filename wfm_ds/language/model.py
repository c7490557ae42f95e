"""A vision-language model as transformers loads it: its tokenizer, its forward on a row, its parts by name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from wfm_ds.errors import ModelError
from wfm_ds.language.annotations import Kind
from wfm_ds.language.rows import RowBatch, Sample
from wfm_ds.language.sequence import own_labels
from wfm_ds.models.base import without_progress_bars
from wfm_ds.models.language_location import resolve
from wfm_ds.ulysses.exchange import gather

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VISION = "model.visual."
MERGERS = re.compile(r"model\.visual\.(merger|deepstack_merger_list)\.")
LOSS_CHUNK = 1024  # tokens whose logits are float32 at the same time


@dataclass(frozen=True, slots=True)
class Prediction:
    """The outcome of a forward for the tokens that were to predict."""

    losses: Tensor  # [N] float32, cross-entropy of each
    hits: Tensor  # [N] float32, 1 where the likeliest token was right


@dataclass(kw_only=True)
class LanguageModel:
    """A loaded model."""

    path: Path
    network: nn.Module
    tokenizer: Any
    image_processor: Any
    dtype: torch.dtype
    group: ProcessGroup | None = None  # the ranks that share each row's tokens (sequence.py)
    by_segments: bool = False  # a forward is told where conversations begin (attention.py), not by positions alone
    forward_module: Any = field(init=False)  # what computes: the network, or the engine around it

    def __post_init__(self) -> None:
        self.forward_module = self.network

    @functools.cached_property
    def pad_ids(self) -> dict[Kind, int]:
        config = self.config
        return {"image": int(config.image_token_id), "video": int(config.video_token_id)}

    @property
    def config(self) -> Any:
        return self.network.config

    @property
    def timed_frames(self) -> bool:
        """True if the frames of a video have their times written between them."""
        return str(self.config.model_type).startswith("qwen3")

    @property
    def default_lora_targets(self) -> list[str]:
        """The linear layers of the language model's attention and MLPs, by their whole names: those of the vision tower
        have some of the same last names."""
        return [
            name
            for name, layer in self.network.named_modules()
            if isinstance(layer, nn.Linear) and not name.startswith(VISION) and name.rpartition(".")[2] in TARGETS
        ]

    def frozen(self, groups: Sequence[str]) -> frozenset[str]:
        """The names of the parameters in these of the parts vision, merger and language."""
        return frozenset(name for name, _ in self.network.named_parameters() if part_of(name) in groups)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def positions(self, sample: Sample) -> Tensor:
        """The rotary positions [3, L] of one conversation. Computed on the host."""
        if not sample.pixels:
            return torch.arange(len(sample.tokens)).expand(3, -1)
        bare: Any = self.network
        place = bare.model.get_rope_index
        more = {"second_per_grid_ts": torch.tensor(sample.seconds_per_time)} if sample.seconds_per_time else {}
        known = inspect.signature(place).parameters
        positions, _ = place(
            torch.tensor([sample.tokens.ids]),
            mm_token_type_ids=sample.types(self.pad_ids),
            image_grid_thw=sample.grids("image"),
            video_grid_thw=sample.grids("video"),
            **{name: value for name, value in more.items() if name in known},
        )
        found: Tensor = positions[:, 0]
        return found

    def predict(self, row: RowBatch) -> Prediction:
        """Losses of the labelled tokens of a row: logits are made of no others. All ranks do the same forwards; those
        that share a row pass the same one, and each gets all its losses."""
        if self.group is None:
            return self._predict(row, row.kept, row.targets)
        kept, targets, lengths = own_labels(row.kept, row.targets, row.input_ids.shape[1], self.group)
        part = self._predict(row, kept, targets)
        if not any(lengths):
            return part
        return Prediction(gather(part.losses, 0, lengths, self.group), gather(part.hits, 0, lengths, self.group))

    def _predict(self, row: RowBatch, kept: Tensor, targets: Tensor) -> Prediction:
        segments = {"segments": row.segments} if self.by_segments else {}
        output = self.forward_module(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            use_cache=False,  # with a cache the conversations of a row would see each other (rows.py)
            logits_to_keep=kept,
            **segments,
            **row.media,
        )
        return scored(output.logits[0], targets)


def part_of(name: str) -> str:
    """Return the part that a parameter belongs to: vision, merger or language."""
    if MERGERS.match(name):
        return "merger"
    return "vision" if name.startswith(VISION) else "language"


def scored(logits: Tensor, targets: Tensor) -> Prediction:
    """Compare logits [N, V] with the tokens [N] that were right, in float32, a chunk at a time: the backward pass makes
    each chunk's float32 logits again instead of keeping them."""
    losses: list[Tensor] = []
    for part, right in zip(torch.split(logits, LOSS_CHUNK), torch.split(targets, LOSS_CHUNK), strict=True):
        if torch.is_grad_enabled() and logits.dtype != torch.float32:
            losses.append(torch.utils.checkpoint.checkpoint(_losses, part, right, use_reentrant=False))
        else:
            losses.append(_losses(part, right))
    hits = (logits.detach().argmax(dim=-1) == targets).float()
    return Prediction(torch.cat(losses) if losses else logits.float().sum(dim=-1), hits)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


def check_folder(folder: Path) -> Any:
    """The config of the model in a folder. ModelError if it is not one that rows are made for."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its config cannot be read: {error}") from error
    if not hasattr(config, "vision_config") or not hasattr(config, "image_token_id"):
        raise ModelError(f"{folder}: {config.model_type} has no vision tower; name a model of the Qwen-VL kind")
    return config


def load(path: str, dtype: torch.dtype, revision: str | None = None) -> LanguageModel:
    """Load a model with its weights as they are stored; an engine gives them their dtype and place. ModelError if it
    cannot be loaded."""
    folder = resolve(path, revision)
    check_folder(folder)
    try:
        with without_progress_bars():
            network, news = AutoModelForImageTextToText.from_pretrained(
                folder,
                dtype="auto",
                attn_implementation=attention(dtype),
                local_files_only=True,
                output_loading_info=True,
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"{folder}: the model cannot be loaded: {error}") from error
    if lacking := sorted(news["missing_keys"]):
        raise ModelError(f"{folder}: {len(lacking)} weights are missing, e.g. {lacking[0]}; copy the model again")
    network.train()  # else gradient checkpointing is off; there is no dropout
    # The name that diffusers' models have for it, under which the engine calls it.
    network.enable_gradient_checkpointing = functools.partial(checkpoint_blocks, network)
    return LanguageModel(path=folder, network=network, tokenizer=tokenizer, image_processor=processor, dtype=dtype)


def checkpoint_blocks(network: Any) -> None:
    """Compute the blocks' activations again in the backward pass. Transformers would also have the outputs of all
    embeddings require gradients, which checkpointing in its older form needs: a frozen tower would get a backward pass
    that ends nowhere."""
    network.gradient_checkpointing_enable({"use_reentrant": False})
    network.disable_input_require_grads()


def attention(dtype: torch.dtype) -> str:
    """The kernel: FlashAttention 2 where it is installed and can serve, else torch's own."""
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if dtype == torch.bfloat16 and is_flash_attn_2_available() else "sdpa"
