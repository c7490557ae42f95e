"""Packed sequences: several conversations that do not attend to each other, with their images and videos.

Only the positions separate the conversations. `position_ids` has four rows: the position of each token within its
conversation, restarting at 0, and the three rotary positions of the model. Without mask and cache, transformers limits
attention to one conversation based on the first row. With only three rows, or with a cache, it silently lets the
conversations attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from wfm_ds.data.pixels import BadMedia
from wfm_ds.language.annotations import KINDS, BadConversation, Conversation, Kind
from wfm_ds.language.lengths import Size, key_of
from wfm_ds.language.media import MediaReader, Pixels, Sized
from wfm_ds.language.render import IGNORED, Renderer, Tokens
from wfm_ds.recipe.schema import Recipe

Positions = Callable[["Sample"], Tensor]  # rotary positions [3, L] int64 of one conversation
INPUTS: dict[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
LEFT, RIGHT = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Sample:
    """A tokenised conversation with its pixels, ready for packing."""

    id: str
    tokens: Tokens
    pixels: list[tuple[Kind, Pixels]]
    seconds_per_time: list[float]  # time step of each video

    def grids(self, kind: Kind) -> Tensor | None:
        """Return the grids [media, 3] int64 of the media of this kind, or None without any."""
        grids = [pixels.grid for media_kind, pixels in self.pixels if media_kind == kind]
        return torch.tensor(grids) if grids else None

    def types(self, pad_ids: dict[Kind, int]) -> Tensor:
        """Return the token types [1, L] int64: 0 for text, 1 for image tokens, 2 for video tokens."""
        ids = torch.tensor([self.tokens.ids])
        return (ids == pad_ids["image"]).long() + 2 * (ids == pad_ids["video"]).long()


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Arguments of one forward pass, and its labelled positions."""

    input_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [4, 1, L] int64
    media: dict[str, Tensor]  # pixel_values [patches, D] float32, image_grid_thw [images, 3]; the same of videos
    kept: Tensor  # [N] int64, positions with their next token in the loss
    targets: Tensor  # [N] int64, the next tokens
    weights: Tensor  # [N] float32
    num_samples: int  # number of conversations with labels
    segments: list[int]  # number of tokens of each conversation, including blank ones

    def to(self, device: torch.device) -> RowBatch:
        media = {name: tensor.to(device) for name, tensor in self.media.items()}
        tensors = (self.input_ids, self.position_ids, self.kept, self.targets, self.weights)
        ids, positions, label_positions, targets, weights = (tensor.to(device) for tensor in tensors)
        return RowBatch(ids, positions, media, label_positions, targets, weights, self.num_samples, self.segments)


class SampleReader:
    """Reads conversations: token counts from file headers, pixels from the files."""

    def __init__(
        self,
        renderer: Renderer,
        media: MediaReader,
        *,
        timed_frames: bool,
        max_tokens: int,
        too_long: Literal["skip", "truncate_answer"],
    ) -> None:
        """has_frame_times: write timestamps between the frames of a video (Qwen3-VL)."""
        self._renderer, self._media, self._timed = renderer, media, timed_frames
        self._max_tokens, self._too_long = max_tokens, too_long

    def tokens(self, conversation: Conversation) -> tuple[Tokens, list[Sized]]:
        """Return the tokens of a conversation and the sizes of its media. Raises BadConversation."""
        media_sizes = self._sized(conversation)
        tokens = self._renderer.render(conversation, [self._expansion(size) for size in media_sizes])
        if len(tokens) > self._max_tokens:
            tokens = self._cut(conversation, tokens)
        if all(label == IGNORED for label in tokens.labels):
            raise BadConversation("too_long", conversation.id, f"no answer within the first {self._max_tokens} tokens")
        return tokens, media_sizes

    def size(self, conversation: Conversation) -> Size:
        """Return the token counts of a conversation, from file headers. Raises BadConversation."""
        tokens, media_sizes = self.tokens(conversation)
        media = sum(media_size.num_times * media_size.num_tokens for media_size in media_sizes)
        return Size(len(tokens), media, sum(label != IGNORED for label in tokens.labels))

    def key(self, recipe: Recipe, digest: str) -> str:
        """Return the cache key of the sizes of annotations with this digest."""
        return key_of(recipe, digest, self._renderer.tokenizer, self._media.processor)

    def read(self, conversation: Conversation) -> Sample:
        """Read a conversation with its pixels. Raises BadConversation."""
        return self._with_pixels(conversation, *self.tokens(conversation))

    def read_question(self, conversation: Conversation) -> Sample:
        """Read a conversation that ends with a question, for generating the answer. Raises BadConversation."""
        media_sizes = self._sized(conversation)
        tokens = self._renderer.question(conversation, [self._expansion(size) for size in media_sizes])
        return self._with_pixels(conversation, tokens, media_sizes)

    def _sized(self, conversation: Conversation) -> list[Sized]:
        try:
            return [self._media.sized(item) for item in conversation.media]
        except BadMedia as error:
            raise BadConversation("media", conversation.id, str(error)) from error

    def _with_pixels(self, conversation: Conversation, tokens: Tokens, sized: Sequence[Sized]) -> Sample:
        try:
            pixels = [(item.kind, self._media.read(item)) for item in conversation.media]
        except BadMedia as error:
            raise BadConversation("media", conversation.id, str(error)) from error
        for size, (_, patches) in zip(sized, pixels, strict=True):
            if np.prod(patches.grid) != size.num_times * size.num_tokens * self._media.merge**2:
                raise BadConversation("media", conversation.id, "the size of an image or video differs from its header")
        return Sample(conversation.id, tokens, pixels, [s.seconds_per_time for s in sized if s.kind == "video"])

    def blank(self, kind: Kind) -> Sample:
        """Return a conversation with one blank image or video of one token and no labels."""
        text = f"{LEFT}{self._renderer.pads[kind]}{RIGHT}"
        ids = list(self._renderer.tokenizer(text, add_special_tokens=False)["input_ids"])
        seconds = [1.0] if kind == "video" else []
        return Sample("", Tokens(ids, [IGNORED] * len(ids)), [(kind, self._media.blank(kind))], seconds)

    def _expansion(self, medium: Sized) -> str:
        pads = self._renderer.pads[medium.kind] * medium.num_tokens
        if medium.kind == "video" and self._timed:
            return "".join(f"<{moment:.1f} seconds>{LEFT}{pads}{RIGHT}" for moment in medium.seconds)
        return f"{LEFT}{pads * medium.num_times}{RIGHT}"

    def _cut(self, conversation: Conversation, tokens: Tokens) -> Tokens:
        """Truncate to max_tokens. Raises BadConversation with too_long: skip, or if media would be cut."""
        media_ids, limit = frozenset(self._renderer.pad_ids.values()), self._max_tokens
        if self._too_long == "skip" or media_ids & set(tokens.ids[limit:]):
            raise BadConversation("too_long", conversation.id, f"{len(tokens)} tokens, the limit is {limit}")
        return Tokens(tokens.ids[:limit], tokens.labels[:limit])


class RowMaker:
    """Packs samples into one sequence, with blank media if needed."""

    def __init__(self, positions: Positions, blanks: Sequence[Sample], *, by_sample: bool) -> None:
        """blanks: one blank sample per kind of media in the run. by_sample: weight 1 per sample instead of per token.

        All ranks must run the vision tower alike, to gather its weights (ZeRO-3) or sum its gradients. A sequence
        without media of some kind therefore gets the blank sample, which no other token attends to.
        """
        self._positions, self._blanks, self._by_sample = positions, blanks, by_sample

    def row(self, samples: Sequence[Sample]) -> RowBatch:
        """Pack samples into one sequence. Without samples, return a blank sequence without labels."""
        kinds = {kind for sample in samples for kind, _ in sample.pixels}
        # A sequence must not be empty, so use a blank sample also for data without media.
        missing_blanks = [b for b in self._blanks if b.pixels[0][0] not in kinds]
        parts = [*samples, *(missing_blanks if missing_blanks or samples else self._blanks[:1])]
        ids = torch.tensor([token for part in parts for token in part.tokens.ids])
        labels = torch.tensor([label for part in parts for label in part.tokens.labels])
        label_positions = torch.nonzero(labels[1:] != IGNORED)[:, 0]
        counts = [sum(label != IGNORED for label in part.tokens.labels) for part in parts]
        weights = [1 / count if self._by_sample else 1.0 for count in counts for _ in range(count)]
        return RowBatch(
            input_ids=ids[None],
            position_ids=torch.cat([self._four_rows(part) for part in parts], dim=1)[:, None],
            media=stacked(parts),
            kept=label_positions,
            targets=labels[1:][label_positions],
            weights=torch.tensor(weights, dtype=torch.float32),
            num_samples=sum(count > 0 for count in counts),
            segments=[len(part.tokens) for part in parts],
        )

    def _four_rows(self, sample: Sample) -> Tensor:
        """Return positions [4, L]: the position in the conversation, then the three rotary positions."""
        return torch.cat([torch.arange(len(sample.tokens))[None], self._positions(sample)])


def stacked(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Concatenate the media of all samples as model arguments: one vision tower call each for images and videos."""
    media: dict[str, Tensor] = {}
    for kind in KINDS:
        patches = [pixels for sample in samples for media_kind, pixels in sample.pixels if media_kind == kind]
        if patches:
            values, grids = INPUTS[kind]
            media[values] = torch.cat([torch.from_numpy(pixels.patches) for pixels in patches])
            media[grids] = torch.tensor([pixels.grid for pixels in patches])
    return media
