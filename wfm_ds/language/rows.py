"""Rows of tokens: conversations side by side that do not see each other, with their images and videos.

What separates them are the positions alone. `position_ids` has four rows: the place of each token in its conversation,
which begins again at 0 with each, and the three of the model's own rotary embedding. Without a mask and without a cache
transformers makes of the first row that a token attends to its own conversation only; given three rows, or a cache, it
says nothing and lets them see each other.
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

Positions = Callable[["Sample"], Tensor]  # the model's own, [3, L] int64, of one conversation
INPUTS: dict[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
LEFT, RIGHT = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation, ready for a row."""

    id: str
    tokens: Tokens
    pixels: list[tuple[Kind, Pixels]]
    seconds_per_time: list[float]  # of each video

    def grids(self, kind: Kind) -> Tensor | None:
        """[media, 3] int64 of its media of this kind; None if there are none."""
        grids = [pixels.grid for of_kind, pixels in self.pixels if of_kind == kind]
        return torch.tensor(grids) if grids else None

    def types(self, pad_ids: dict[Kind, int]) -> Tensor:
        """[1, L] int64: 0 for text, 1 for an image's token, 2 for a video's."""
        ids = torch.tensor([self.tokens.ids])
        return (ids == pad_ids["image"]).long() + 2 * (ids == pad_ids["video"]).long()


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Arguments of one forward, and the places that it is to predict."""

    input_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [4, 1, L] int64
    media: dict[str, Tensor]  # pixel_values [patches, D] float32, image_grid_thw [images, 3]; the same of videos
    kept: Tensor  # [N] int64, places whose next token is in the loss
    targets: Tensor  # [N] int64, that token
    weights: Tensor  # [N] float32
    num_samples: int  # that have any such place
    segments: list[int]  # tokens of each conversation, and of what stands beside them

    def to(self, device: torch.device) -> RowBatch:
        media = {name: tensor.to(device) for name, tensor in self.media.items()}
        tensors = (self.input_ids, self.position_ids, self.kept, self.targets, self.weights)
        ids, positions, kept, targets, weights = (tensor.to(device) for tensor in tensors)
        return RowBatch(ids, positions, media, kept, targets, weights, self.num_samples, self.segments)


class SampleReader:
    """Makes samples of conversations: their lengths from headers, their pixels from the files."""

    def __init__(
        self,
        renderer: Renderer,
        media: MediaReader,
        *,
        timed_frames: bool,
        max_tokens: int,
        too_long: Literal["skip", "truncate_answer"],
    ) -> None:
        """timed_frames: the frames of a video have their times written between them (Qwen3-VL)."""
        self._renderer, self._media, self._timed = renderer, media, timed_frames
        self._max_tokens, self._too_long = max_tokens, too_long

    def tokens(self, conversation: Conversation) -> tuple[Tokens, list[Sized]]:
        """Tokens of a conversation, and what they depend on. Raises BadConversation."""
        sized = self._sized(conversation)
        tokens = self._renderer.render(conversation, [self._expansion(medium) for medium in sized])
        if len(tokens) > self._max_tokens:
            tokens = self._cut(conversation, tokens)
        if all(label == IGNORED for label in tokens.labels):
            raise BadConversation("too_long", conversation.id, f"no answer is left in {self._max_tokens} tokens")
        return tokens, sized

    def size(self, conversation: Conversation) -> Size:
        """The sizes of a conversation, from headers. Raises BadConversation."""
        tokens, sized = self.tokens(conversation)
        media = sum(medium.num_times * medium.num_tokens for medium in sized)
        return Size(len(tokens), media, sum(label != IGNORED for label in tokens.labels))

    def key(self, recipe: Recipe, digest: str) -> str:
        """Name what the sizes of annotations with this digest depend on."""
        return key_of(recipe, digest, self._renderer.tokenizer, self._media.processor)

    def read(self, conversation: Conversation) -> Sample:
        """The conversation with its pixels. Raises BadConversation."""
        return self._with_pixels(conversation, *self.tokens(conversation))

    def read_question(self, conversation: Conversation) -> Sample:
        """A conversation that ends with a question, up to where the model is to answer. Raises BadConversation."""
        sized = self._sized(conversation)
        tokens = self._renderer.question(conversation, [self._expansion(medium) for medium in sized])
        return self._with_pixels(conversation, tokens, sized)

    def _sized(self, conversation: Conversation) -> list[Sized]:
        try:
            return [self._media.sized(medium) for medium in conversation.media]
        except BadMedia as error:
            raise BadConversation("media", conversation.id, str(error)) from error

    def _with_pixels(self, conversation: Conversation, tokens: Tokens, sized: Sequence[Sized]) -> Sample:
        try:
            pixels = [(medium.kind, self._media.read(medium)) for medium in conversation.media]
        except BadMedia as error:
            raise BadConversation("media", conversation.id, str(error)) from error
        for size, (_, found) in zip(sized, pixels, strict=True):
            if np.prod(found.grid) != size.num_times * size.num_tokens * self._media.merge**2:
                raise BadConversation("media", conversation.id, "a medium has another size than its header says")
        return Sample(conversation.id, tokens, pixels, [s.seconds_per_time for s in sized if s.kind == "video"])

    def blank(self, kind: Kind) -> Sample:
        """A conversation of one image or video of one token, with nothing to predict."""
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
        """The beginning of too many tokens, if what is cut has no media in it."""
        silent, most = frozenset(self._renderer.pad_ids.values()), self._max_tokens
        if self._too_long == "skip" or silent & set(tokens.ids[most:]):
            raise BadConversation("too_long", conversation.id, f"{len(tokens)} tokens, at most {most} are allowed")
        return Tokens(tokens.ids[:most], tokens.labels[:most])


class RowMaker:
    """Puts samples into one row, with the media that every row must have."""

    def __init__(self, positions: Positions, blanks: Sequence[Sample], *, by_sample: bool) -> None:
        """blanks: one of each kind of media that any row of the run has. At ZeRO-3 a forward gathers the weights of the
        vision tower on all ranks, and elsewhere its gradients are summed over all: a row without such media gets the
        blank one, which nothing sees. by_sample: each sample counts 1, not each token."""
        self._positions, self._blanks, self._by_sample = positions, blanks, by_sample

    def row(self, samples: Sequence[Sample]) -> RowBatch:
        """Put these samples into one row; without any it is blank, and has nothing to predict."""
        there = {kind for sample in samples for kind, _ in sample.pixels}
        # At least one, for a model whose data has no media at all: a row of nothing has no forward.
        missing = [b for b in self._blanks if b.pixels[0][0] not in there]
        parts = [*samples, *(missing if missing or samples else self._blanks[:1])]
        ids = torch.tensor([token for part in parts for token in part.tokens.ids])
        labels = torch.tensor([label for part in parts for label in part.tokens.labels])
        kept = torch.nonzero(labels[1:] != IGNORED)[:, 0]
        counts = [sum(label != IGNORED for label in part.tokens.labels) for part in parts]
        weights = [1 / count if self._by_sample else 1.0 for count in counts for _ in range(count)]
        return RowBatch(
            input_ids=ids[None],
            position_ids=torch.cat([self._four_rows(part) for part in parts], dim=1)[:, None],
            media=stacked(parts),
            kept=kept,
            targets=labels[1:][kept],
            weights=torch.tensor(weights, dtype=torch.float32),
            num_samples=sum(count > 0 for count in counts),
            segments=[len(part.tokens) for part in parts],
        )

    def _four_rows(self, sample: Sample) -> Tensor:
        """[4, L]: the place in the conversation, then the model's own three."""
        return torch.cat([torch.arange(len(sample.tokens))[None], self._positions(sample)])


def stacked(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The media of all samples as arguments of the model: one call of its tower for all images, one for all videos."""
    media: dict[str, Tensor] = {}
    for kind in KINDS:
        found = [pixels for sample in samples for of_kind, pixels in sample.pixels if of_kind == kind]
        if found:
            values, grids = INPUTS[kind]
            media[values] = torch.cat([torch.from_numpy(pixels.patches) for pixels in found])
            media[grids] = torch.tensor([pixels.grid for pixels in found])
    return media
