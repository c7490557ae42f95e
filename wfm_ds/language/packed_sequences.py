"""Packed sequences. Each consists of several conversations with their images and videos.

Conversations in a sequence do not attend to each other. transformers infers their boundaries from `position_ids` with
four rows: the position of each token within its conversation, starting at 0, and the three rotary positions. Do not
pass fewer rows, an attention mask or a cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wfm_ds.data.pixels import BadMedia
from wfm_ds.language.annotations import MEDIA_KINDS, BadConversation, Conversation, MediaKind
from wfm_ds.language.media import MediaPatches, MediaReader, MediaSize
from wfm_ds.language.renderer import IGNORE_INDEX, Renderer, Tokens
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

SIZE_FORMAT = 1
SIZE_SETTINGS = ("media_path", "system_prompt", "max_tokens", "too_long", "pixels", "video")


class ConversationSize(NamedTuple):
    """The token counts of a conversation: all tokens, image and video tokens, and labelled tokens."""

    tokens: int
    media: int
    labelled: int


UNKNOWN_SIZE = ConversationSize(0, 0, 0)


class SizeCache:
    """File CACHE/lengths/<key>.npy that caches the token counts of all conversations.

    It is an int32 array [conversations, 3]. Its columns are the numbers of all tokens, of image and video tokens, and
    of labelled tokens. A row of zeros means that the counts are unknown.
    """

    def __init__(self, cache_dir: Path, key: str) -> None:
        self.file = cache_dir / "lengths" / f"{key}.npy"

    def read(self, count: int) -> list[ConversationSize]:
        """Return the sizes of `count` conversations. A size that is not cached is UNKNOWN_SIZE."""
        try:
            array = np.load(self.file, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            array = np.empty(0)
        known = array.shape == (count, 3)
        return [ConversationSize(*size) for size in array.tolist()] if known else [UNKNOWN_SIZE] * count

    def write(self, sizes: Sequence[ConversationSize]) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with atomic.new_file(self.file) as part, part.open("wb") as out:
                np.save(out, np.array(sizes, np.int32).reshape(-1, 3))
        except OSError as error:
            log.warning("%s cannot be written (%s); the next run counts all tokens again", self.file, error)


Positions = Callable[["ConversationSample"], Tensor]  # rotary positions [3, L] int64 of one conversation
INPUTS: dict[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class ConversationSample:
    """A tokenized conversation with its pixels."""

    id: str
    tokens: Tokens
    pixels: list[tuple[MediaKind, MediaPatches]]
    seconds_per_time: list[float]  # time step of each video

    def media_grids(self, kind: MediaKind) -> Tensor | None:
        """Return the patch grids int64 [number of files, 3] of all images or of all videos, or None if there are none.

        A grid is the number of patches along time, height and width.
        """
        grids = [pixels.grid for media_kind, pixels in self.pixels if media_kind == kind]
        return torch.tensor(grids) if grids else None

    def token_types(self, pad_ids: dict[MediaKind, int]) -> Tensor:
        """Return the type of each of the L tokens, int64 [1, L]: 0 for text, 1 for image tokens, 2 for video tokens."""
        ids = torch.tensor([self.tokens.ids])
        return (ids == pad_ids["image"]).long() + 2 * (ids == pad_ids["video"]).long()


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """The inputs and labels of one forward pass. It has L tokens, and the loss predicts N of them."""

    input_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [4, 1, L] int64
    media: dict[str, Tensor]  # pixel_values [patches, D] float32, image_grid_thw [images, 3]; same for videos
    label_positions: Tensor  # [N] int64, positions at which the next token is predicted in the loss
    targets: Tensor  # [N] int64, the next tokens
    weights: Tensor  # [N] float32
    num_samples: int  # number of conversations with labels
    segments: list[int]  # number of tokens of each conversation, including blank ones

    def to_device(self, device: torch.device) -> PackedSequence:
        media = {name: tensor.to(device) for name, tensor in self.media.items()}
        tensors = (self.input_ids, self.position_ids, self.label_positions, self.targets, self.weights)
        ids, positions, label_positions, targets, weights = (tensor.to(device) for tensor in tensors)
        return PackedSequence(ids, positions, media, label_positions, targets, weights, self.num_samples, self.segments)


class ConversationReader:
    """Reads and tokenizes conversations."""

    def __init__(
        self,
        renderer: Renderer,
        media: MediaReader,
        *,
        has_frame_times: bool,
        max_tokens: int,
        too_long: Literal["skip", "truncate_answer"],
    ) -> None:
        self._renderer, self._media, self._has_frame_times = renderer, media, has_frame_times
        self._max_tokens, self._too_long = max_tokens, too_long

    def tokenize(self, conversation: Conversation) -> tuple[Tokens, list[MediaSize]]:
        """Return the tokens of a conversation, and the sizes of its images and videos. Raises BadConversation."""
        media_sizes = self._measure_media(conversation)
        tokens = self._renderer.render(conversation, [self._media_text(size) for size in media_sizes])
        if len(tokens) > self._max_tokens:
            tokens = self._truncate(conversation, tokens)
        if all(label == IGNORE_INDEX for label in tokens.labels):
            raise BadConversation("too_long", conversation.id, f"no answer within the first {self._max_tokens} tokens")
        return tokens, media_sizes

    def measure(self, conversation: Conversation) -> ConversationSize:
        """Return the token counts of a conversation from the headers of its files. Raises BadConversation."""
        tokens, media_sizes = self.tokenize(conversation)
        media = sum(media_size.num_times * media_size.num_tokens for media_size in media_sizes)
        return ConversationSize(len(tokens), media, sum(label != IGNORE_INDEX for label in tokens.labels))

    def cache_key(self, recipe: Recipe, digest: str) -> str:
        """Return the key for SizeCache: a hash of all settings that affect token counts, and of the annotations.

        It does not depend on image and video files. digest: hash of the annotations.
        """
        tokenizer = self._renderer.tokenizer
        parts = {
            "format": SIZE_FORMAT,
            "annotations": digest,
            "data": recipe.data.model_dump(mode="json", include=set(SIZE_SETTINGS)),
            "train_on": recipe.language_settings.train_on,
            "template": tokenizer.chat_template,
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "image_processor": self._media.processor.to_json_string(),
        }
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def read(self, conversation: Conversation) -> ConversationSample:
        """Return the tokens and pixels of a conversation. Raises BadConversation if it is unusable."""
        return self._with_pixels(conversation, *self.tokenize(conversation))

    def read_question(self, conversation: Conversation) -> ConversationSample:
        """Read a conversation that ends with a question. Raises BadConversation if it is unusable."""
        media_sizes = self._measure_media(conversation)
        tokens = self._renderer.render_question(conversation, [self._media_text(size) for size in media_sizes])
        return self._with_pixels(conversation, tokens, media_sizes)

    def _measure_media(self, conversation: Conversation) -> list[MediaSize]:
        try:
            return [self._media.measure(item) for item in conversation.media]
        except BadMedia as error:
            raise BadConversation("media", conversation.id, str(error)) from error

    def _with_pixels(
        self, conversation: Conversation, tokens: Tokens, media_sizes: Sequence[MediaSize]
    ) -> ConversationSample:
        try:
            pixels = [(item.kind, self._media.read(item)) for item in conversation.media]
        except BadMedia as error:
            raise BadConversation("media", conversation.id, str(error)) from error
        for size, (_, patches) in zip(media_sizes, pixels, strict=True):
            if np.prod(patches.grid) != size.num_times * size.num_tokens * self._media.merge**2:
                raise BadConversation("media", conversation.id, "the size of an image or video differs from its header")
        return ConversationSample(
            conversation.id, tokens, pixels, [s.seconds_per_time for s in media_sizes if s.kind == "video"]
        )

    def blank_sample(self, kind: MediaKind) -> ConversationSample:
        """Return a conversation without labels that contains only one blank image or video, which is one token."""
        text = f"{VISION_START}{self._renderer.pads[kind]}{VISION_END}"
        ids = list(self._renderer.tokenizer(text, add_special_tokens=False)["input_ids"])
        seconds = [1.0] if kind == "video" else []
        return ConversationSample(
            "", Tokens(ids, [IGNORE_INDEX] * len(ids)), [(kind, self._media.blank(kind))], seconds
        )

    def _media_text(self, size: MediaSize) -> str:
        pads = self._renderer.pads[size.kind] * size.num_tokens
        if size.kind == "video" and self._has_frame_times:
            return "".join(f"<{moment:.1f} seconds>{VISION_START}{pads}{VISION_END}" for moment in size.seconds)
        return f"{VISION_START}{pads * size.num_times}{VISION_END}"

    def _truncate(self, conversation: Conversation, tokens: Tokens) -> Tokens:
        media_ids, limit = frozenset(self._renderer.pad_ids.values()), self._max_tokens
        if self._too_long == "skip" or media_ids & set(tokens.ids[limit:]):
            raise BadConversation("too_long", conversation.id, f"{len(tokens)} tokens, the limit is {limit}")
        return Tokens(tokens.ids[:limit], tokens.labels[:limit])


class SequencePacker:
    """Packs conversations into one sequence.

    If a run has images, a sequence without images gets a blank image, so that all ranks run the vision tower equally
    often. The same applies to videos. No other token attends to blanks.
    """

    def __init__(self, positions: Positions, blanks: Sequence[ConversationSample], *, by_sample: bool) -> None:
        """blanks: one blank sample for each kind (image, video) in the run.

        by_sample: True: conversations have equal weights in the loss. False: labelled tokens have equal weights.
        """
        self._positions, self._blanks, self._by_sample = positions, blanks, by_sample

    def pack_samples(self, samples: Sequence[ConversationSample]) -> PackedSequence:
        """Pack samples into one sequence. If the list is empty, return a blank sequence without labels."""
        kinds = {kind for sample in samples for kind, _ in sample.pixels}
        # The blank samples also fill a sequence without samples, because a sequence must not be empty.
        missing_blanks = [b for b in self._blanks if b.pixels[0][0] not in kinds]
        parts = [*samples, *(missing_blanks if missing_blanks or samples else self._blanks[:1])]
        ids = torch.tensor([token for part in parts for token in part.tokens.ids])
        labels = torch.tensor([label for part in parts for label in part.tokens.labels])
        label_positions = torch.nonzero(labels[1:] != IGNORE_INDEX)[:, 0]
        counts = [sum(label != IGNORE_INDEX for label in part.tokens.labels) for part in parts]
        weights = [1 / count if self._by_sample else 1.0 for count in counts for _ in range(count)]
        return PackedSequence(
            input_ids=ids[None],
            position_ids=torch.cat([self._stack_positions(part) for part in parts], dim=1)[:, None],
            media=stack_media(parts),
            label_positions=label_positions,
            targets=labels[1:][label_positions],
            weights=torch.tensor(weights, dtype=torch.float32),
            num_samples=sum(count > 0 for count in counts),
            segments=[len(part.tokens) for part in parts],
        )

    def _stack_positions(self, sample: ConversationSample) -> Tensor:
        return torch.cat([torch.arange(len(sample.tokens))[None], self._positions(sample)])


def stack_media(samples: Sequence[ConversationSample]) -> dict[str, Tensor]:
    """Return the model arguments {name: tensor} for images and videos. All files of a kind are concatenated."""
    media: dict[str, Tensor] = {}
    for kind in MEDIA_KINDS:
        patches = [pixels for sample in samples for media_kind, pixels in sample.pixels if media_kind == kind]
        if patches:
            values, grids = INPUTS[kind]
            media[values] = torch.cat([torch.from_numpy(pixels.patches) for pixels in patches])
            media[grids] = torch.tensor([pixels.grid for pixels in patches])
    return media
