"""Vision-language models of transformers: loading, forward passes on packed sequences, and parameter groups."""

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
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import (
    AutoImageProcessor,
)  # in 5.17, the public name needs torchvision
from transformers.utils import is_flash_attn_2_available

from wfm_ds.distributed.progress import show_wait
from wfm_ds.errors import ModelError
from wfm_ds.language.annotations import MediaKind
from wfm_ds.language.packed_sequences import ConversationSample, PackedSequence
from wfm_ds.language.sequence_parallel import local_labels
from wfm_ds.models.assets.language_folders import download_language_model
from wfm_ds.models.assets.loading import check_weight_files, hide_progress_bars, require_no_unexpected_weights
from wfm_ds.ulysses.exchange import gather_shards

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VISION = "model.visual."
MERGERS = re.compile(r"model\.visual\.(merger|deepstack_merger_list)\.")
LOSS_CHUNK = 1024  # number of tokens with float32 logits in memory at a time


@dataclass(frozen=True, slots=True)
class TokenPrediction:
    losses: Tensor  # [labelled tokens] float32, cross-entropy
    hits: Tensor  # [labelled tokens] float32, 1 if the most likely token was correct, else 0


@dataclass(kw_only=True)
class LanguageModel:
    """A vision-language model with its tokenizer and image processor."""

    path: Path
    network: nn.Module
    tokenizer: Any
    image_processor: Any
    dtype: torch.dtype
    group: ProcessGroup | None = None  # ranks over which the tokens of a sequence are sharded (sequence_parallel.py)
    uses_segments: bool = False  # forward passes need the segment lengths (attention.py)
    forward_module: Any = field(init=False)  # the network, or the engine that wraps it

    def __post_init__(self) -> None:
        self.forward_module = self.network

    @functools.cached_property
    def pad_ids(self) -> dict[MediaKind, int]:
        config = self.config
        return {"image": int(config.image_token_id), "video": int(config.video_token_id)}

    @property
    def config(self) -> Any:
        return self.network.config

    @property
    def has_frame_times(self) -> bool:
        """Whether the text of a video needs timestamps between its frames, as in Qwen3-VL."""
        return str(self.config.model_type).startswith("qwen3")

    @property
    def default_lora_targets(self) -> list[str]:
        return [
            name
            for name, layer in self.network.named_modules()
            if isinstance(layer, nn.Linear) and not name.startswith(VISION) and name.rpartition(".")[2] in LORA_TARGETS
        ]

    def group_parameter_names(self, groups: Sequence[str]) -> frozenset[str]:
        """Return the names of the parameters in these groups: vision, merger or language."""
        return frozenset(name for name, _ in self.network.named_parameters() if parameter_group(name) in groups)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def rotary_positions(self, sample: ConversationSample) -> Tensor:
        """Return the positions of a conversation's L tokens along time, height and width, int64 [3, L] on the CPU."""
        if not sample.pixels:
            return torch.arange(len(sample.tokens)).expand(3, -1)
        unwrapped: Any = self.network
        get_positions = unwrapped.model.get_rope_index
        optional = {"second_per_grid_ts": torch.tensor(sample.seconds_per_time)} if sample.seconds_per_time else {}
        accepted = inspect.signature(get_positions).parameters
        positions, _ = get_positions(
            torch.tensor([sample.tokens.ids]),
            mm_token_type_ids=sample.token_types(self.pad_ids),
            image_grid_thw=sample.media_grids("image"),
            video_grid_thw=sample.media_grids("video"),
            **{name: value for name, value in optional.items() if name in accepted},
        )
        result: Tensor = positions[:, 0]
        return result

    def predict(self, sequence: PackedSequence) -> TokenPrediction:
        """Return the loss and accuracy of each labelled token.

        All ranks must run the same number of forward passes. With sequence parallelism, all ranks of a group pass the
        same sequence, and each rank receives the results of all labelled tokens.
        """
        if self.group is None:
            return self._forward(sequence, sequence.label_positions, sequence.targets)
        local_positions, targets, lengths = local_labels(
            sequence.label_positions, sequence.targets, sequence.input_ids.shape[1], self.group
        )
        prediction = self._forward(sequence, local_positions, targets)
        if not any(lengths):
            return prediction
        return TokenPrediction(
            gather_shards(prediction.losses, 0, lengths, self.group),
            gather_shards(prediction.hits, 0, lengths, self.group),
        )

    def _forward(self, sequence: PackedSequence, label_positions: Tensor, targets: Tensor) -> TokenPrediction:
        segments = {"segments": sequence.segments} if self.uses_segments else {}
        output = self.forward_module(
            input_ids=sequence.input_ids,
            position_ids=sequence.position_ids,
            use_cache=False,  # with a cache the conversations would attend to each other (packed_sequences.py)
            logits_to_keep=label_positions,
            **segments,
            **sequence.media,
        )
        return score_logits(output.logits[0], targets)


def parameter_group(name: str) -> str:
    if MERGERS.match(name):
        return "merger"
    return "vision" if name.startswith(VISION) else "language"


def score_logits(logits: Tensor, targets: Tensor) -> TokenPrediction:
    """Compute cross-entropy and accuracy of logits [N tokens, V words] against target tokens [N], in float32."""
    losses: list[Tensor] = []
    for chunk, chunk_targets in zip(torch.split(logits, LOSS_CHUNK), torch.split(targets, LOSS_CHUNK), strict=True):
        if torch.is_grad_enabled() and logits.dtype != torch.float32:
            losses.append(torch.utils.checkpoint.checkpoint(_cross_entropy, chunk, chunk_targets, use_reentrant=False))
        else:
            losses.append(_cross_entropy(chunk, chunk_targets))
    hits = (logits.detach().argmax(dim=-1) == targets).float()
    return TokenPrediction(torch.cat(losses) if losses else logits.float().sum(dim=-1), hits)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


def check_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: config cannot be read: {error}") from error
    if not hasattr(config, "vision_config") or not hasattr(config, "image_token_id"):
        raise ModelError(f"{folder}: {config.model_type} has no vision tower; use a Qwen-VL model")
    return config


def load_language_model(path: str, dtype: torch.dtype, revision: str | None = None) -> LanguageModel:
    """Load a model in its stored dtype. Raises ModelError if loading fails. dtype: dtype that the engine later uses."""
    folder = download_language_model(path, revision)
    check_config(folder)
    check_weight_files(folder)
    use_flash = dtype == torch.bfloat16 and is_flash_attn_2_available()
    try:
        with hide_progress_bars(), show_wait(f"loading {path}"):
            network, loading_info = AutoModelForImageTextToText.from_pretrained(
                folder,
                dtype="auto",
                attn_implementation="flash_attention_2" if use_flash else "sdpa",
                local_files_only=True,
                output_loading_info=True,
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"{folder}: the model cannot be loaded: {error}") from error
    if missing := sorted(loading_info["missing_keys"]):
        raise ModelError(f"{folder}: {len(missing)} weights are missing, e.g. {missing[0]}; download the model again")
    require_no_unexpected_weights(folder, network, loading_info["unexpected_keys"])
    network.train()  # enables gradient checkpointing; the models have no dropout
    # The engine calls this method by the name that diffusers models use.
    network.enable_gradient_checkpointing = functools.partial(checkpoint_blocks, network)
    return LanguageModel(path=folder, network=network, tokenizer=tokenizer, image_processor=processor, dtype=dtype)


def checkpoint_blocks(network: Any) -> None:
    """Enable non-reentrant gradient checkpointing of the transformer blocks.

    Unlike in transformers, the outputs of embeddings then require no gradients.
    """
    network.gradient_checkpointing_enable({"use_reentrant": False})
    network.disable_input_require_grads()
