"""Tokens and labels of a conversation: the model's chat template once over all of it, one tokenisation, answers found
by the prefixes of the text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wfm_ds.errors import ModelError
from wfm_ds.language.annotations import BadConversation, Conversation, Kind, Turn

IGNORED = -100  # the label of a token outside the loss, as torch and transformers have it
TrainOn = Literal["answers", "last_answer", "all"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a conversation, and their labels: the token itself, or IGNORED."""

    ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class Renderer:
    """Renders conversations for one model.

    A template has no marks for what a user wrote, and merges of a tokenizer differ at borders: so nothing is tokenised
    in pieces. The text up to an answer, as the template begins it, must be the beginning of the text with the answer;
    what lies between is the answer, to the end of the token that ends it.
    """

    def __init__(self, tokenizer: Any, *, train_on: TrainOn = "answers") -> None:
        """tokenizer: a fast one with a chat template, and special tokens <|image_pad|> and <|video_pad|>."""
        self.tokenizer, self.train_on = tokenizer, train_on
        self.pads: dict[Kind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        self.pad_ids: dict[Kind, int] = {k: int(tokenizer.convert_tokens_to_ids(pad)) for k, pad in self.pads.items()}
        if not getattr(tokenizer, "chat_template", None) or tokenizer.unk_token_id in self.pad_ids.values():
            raise ModelError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template or no {' and '.join(self.pads.values())}"
                "; name a vision-language model of the Qwen kind"
            )
        # The marks around a medium belong to it: some models repeat them for each frame of a video.
        pads = "|".join(re.escape(pad) for pad in self.pads.values())
        self._place = re.compile(rf"(?:<\|vision_start\|>)?(?P<pad>{pads})(?:<\|vision_end\|>)?")

    def render(self, conversation: Conversation, expansions: Sequence[str]) -> Tokens:
        """Tokens of a conversation with these texts in the places of its media, marks included.

        Raises BadConversation for text that holds a mark of media, ModelError for a template that cannot be used.
        """
        text = self._text(conversation.turns)
        answers = [(0, len(text))] if self.train_on == "all" else self._answers(conversation, text)
        whole, moved = self._expanded(text, conversation, expansions)
        spans = [(moved(start), moved(end)) for start, end in answers]
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        return Tokens(ids, self._labels(ids, offsets, spans))

    def question(self, conversation: Conversation, expansions: Sequence[str]) -> Tokens:
        """Tokens up to where the model is to answer, without labels. Raises as `render` does."""
        whole, _ = self._expanded(self._text(conversation.turns, ask=True), conversation, expansions)
        ids = list(self.tokenizer(whole, add_special_tokens=False)["input_ids"])
        return Tokens(ids, [IGNORED] * len(ids))

    def _expanded(
        self, text: str, conversation: Conversation, expansions: Sequence[str]
    ) -> tuple[str, Callable[[int], int]]:
        """Put the texts of media in their places. Returns the text, and where a place outside of them has gone to."""
        places = list(self._place.finditer(text))
        media = [self.pads[medium.kind] for medium in conversation.media]
        if [place["pad"] for place in places] != media:
            raise BadConversation("turn", conversation.id, "its text holds a mark that stands for media")
        return spliced(text, [(*place.span(), new) for place, new in zip(places, expansions, strict=True)])

    def _text(self, turns: Sequence[Turn], *, ask: bool = False) -> str:
        messages = [{"role": turn.role, "content": _content(turn)} for turn in turns]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
        except Exception as error:  # a template runs code of its own
            raise ModelError(f"the chat template of {self.tokenizer.name_or_path} fails: {error}") from error

    def _answers(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """Find the answers in the text, each with the mark that ends it."""
        turns = conversation.turns
        places = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        spans = []
        for i in places[-1:] if self.train_on == "last_answer" else places:
            start, stop = self._text(turns[:i], ask=True), self._text(turns[: i + 1])
            if not stop.startswith(start) or not text.startswith(stop):
                raise ModelError(
                    f"the chat template of {self.tokenizer.name_or_path} writes an answer otherwise once others follow "
                    f"({conversation.id}): set algorithm.train_on to last_answer, or all"
                )
            mark = self.tokenizer.eos_token or ""
            end = stop.rfind(mark, len(start)) + len(mark) if mark else -1
            spans.append((len(start), end if end > len(start) and not stop[end:].strip() else len(stop)))
        return spans

    def _labels(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
    ) -> list[int]:
        silent = frozenset(self.pad_ids.values())
        labels, left = [IGNORED] * len(ids), iter([*spans, (1 << 62, 1 << 62)])
        start, end = next(left)
        for i, (begins, ends) in enumerate(offsets):
            while begins >= end:
                start, end = next(left)
            if start <= begins and ends <= end and begins < ends and ids[i] not in silent:
                labels[i] = ids[i]
        if labels:
            labels[0] = IGNORED  # in a row it would be predicted from another conversation's last token
        return labels


def _content(turn: Turn) -> Any:
    """The content of a turn as templates take it: a text, or a list where media are among it."""
    if all(isinstance(part, str) for part in turn.parts):
        return "".join(map(str, turn.parts))
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.kind} for p in turn.parts]


def spliced(text: str, news: Sequence[tuple[int, int, str]]) -> tuple[str, Callable[[int], int]]:
    """Replace [start, end) by new texts, in order. Returns the text, and where a place outside of them has gone to."""
    pieces, last, shifts, shift = [], 0, [], 0
    for start, end, new in news:
        pieces += [text[last:start], new]
        last = end
        shift += len(new) - (end - start)
        shifts.append((end, shift))
    return "".join([*pieces, text[last:]]), functools.partial(_moved, shifts)


def _moved(shifts: Sequence[tuple[int, int]], place: int) -> int:
    return place + max(((end, shift) for end, shift in shifts if end <= place), default=(0, 0))[1]
