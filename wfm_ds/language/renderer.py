"""Tokens and labels of a conversation: apply the chat template, and label the answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wfm_ds.errors import ModelError
from wfm_ds.language.annotations import BadConversation, Conversation, MediaKind, Turn

IGNORE_INDEX = -100  # label of tokens outside the loss, as in torch and transformers
TrainOn = Literal["answers", "last_answer", "all"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a conversation, and their labels: the token if it counts in the loss, otherwise IGNORE_INDEX."""

    ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class Renderer:
    """Renders conversations to tokens for one model."""

    def __init__(self, tokenizer: Any, *, train_on: TrainOn = "answers") -> None:
        """tokenizer: a fast tokenizer with a chat template and the special tokens <|image_pad|> and <|video_pad|>."""
        self.tokenizer, self.train_on = tokenizer, train_on
        self.pads: dict[MediaKind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        self.pad_ids: dict[MediaKind, int] = {
            k: int(tokenizer.convert_tokens_to_ids(pad)) for k, pad in self.pads.items()
        }
        if not getattr(tokenizer, "chat_template", None) or tokenizer.unk_token_id in self.pad_ids.values():
            raise ModelError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template or no {' and '.join(self.pads.values())}"
                "; use a Qwen-VL model"
            )
        # The pattern includes the start and end tokens, because some models repeat them for each frame of a video.
        pads = "|".join(re.escape(pad) for pad in self.pads.values())
        self._media_pattern = re.compile(rf"(?:<\|vision_start\|>)?(?P<pad>{pads})(?:<\|vision_end\|>)?")

    def render(self, conversation: Conversation, expansions: Sequence[str]) -> Tokens:
        """Tokenize a conversation.

        expansions: the text that replaces each image or video, with start and end tokens. Raises BadConversation if the
        text contains other media tokens, and ModelError for an unsupported template.
        """
        text = self._apply_template(conversation.turns)
        answers = [(0, len(text))] if self.train_on == "all" else self._find_answers(conversation, text)
        expanded, shift = self._expand_media(text, conversation, expansions)
        spans = [(shift(start), shift(end)) for start, end in answers]
        encoded = self.tokenizer(expanded, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        return Tokens(ids, self._make_labels(ids, offsets, spans))

    def render_question(self, conversation: Conversation, expansions: Sequence[str]) -> Tokens:
        """Tokenize a conversation up to the generation prompt, without labels. Raises the same errors as `render`."""
        expanded, _ = self._expand_media(
            self._apply_template(conversation.turns, add_generation_prompt=True), conversation, expansions
        )
        ids = list(self.tokenizer(expanded, add_special_tokens=False)["input_ids"])
        return Tokens(ids, [IGNORE_INDEX] * len(ids))

    def _expand_media(
        self, text: str, conversation: Conversation, expansions: Sequence[str]
    ) -> tuple[str, Callable[[int], int]]:
        """Replace each media token by its expansion.

        Returns the new text, and a function that maps positions in the old text to positions in the new text.
        """
        matches = list(self._media_pattern.finditer(text))
        media = [self.pads[item.kind] for item in conversation.media]
        if [match["pad"] for match in matches] != media:
            raise BadConversation("turn", conversation.id, "text contains a media token")
        return splice_text(text, [(*match.span(), new) for match, new in zip(matches, expansions, strict=True)])

    def _apply_template(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        messages = [{"role": turn.role, "content": _template_content(turn)} for turn in turns]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # templates run arbitrary code
            raise ModelError(f"the chat template of {self.tokenizer.name_or_path} fails: {error}") from error

    def _find_answers(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) positions of the answers in the text, including their end-of-turn tokens."""
        turns = conversation.turns
        answer_turns = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        spans = []
        for i in answer_turns[-1:] if self.train_on == "last_answer" else answer_turns:
            start = self._apply_template(turns[:i], add_generation_prompt=True)
            stop = self._apply_template(turns[: i + 1])
            if not stop.startswith(start) or not text.startswith(stop):
                raise ModelError(
                    f"the chat template of {self.tokenizer.name_or_path} changes an answer if more turns follow "
                    f"({conversation.id}): set algorithm.train_on to last_answer or all"
                )
            eos = self.tokenizer.eos_token or ""
            end = stop.rfind(eos, len(start)) + len(eos) if eos else -1
            spans.append((len(start), end if end > len(start) and not stop[end:].strip() else len(stop)))
        return spans

    def _make_labels(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
    ) -> list[int]:
        media_ids = frozenset(self.pad_ids.values())
        labels, remaining = [IGNORE_INDEX] * len(ids), iter([*spans, (1 << 62, 1 << 62)])
        start, end = next(remaining)
        for i, (begins, ends) in enumerate(offsets):
            while begins >= end:
                start, end = next(remaining)
            if start <= begins and ends <= end and begins < ends and ids[i] not in media_ids:
                labels[i] = ids[i]
        if labels:
            labels[0] = IGNORE_INDEX  # a packed sequence would predict the first token from the previous conversation
        return labels


def _template_content(turn: Turn) -> Any:
    if all(isinstance(part, str) for part in turn.parts):
        return "".join(map(str, turn.parts))
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.kind} for p in turn.parts]


def splice_text(text: str, replacements: Sequence[tuple[int, int, str]]) -> tuple[str, Callable[[int], int]]:
    """Replace parts of a text. replacements: (start, end, new text), in ascending order.

    Returns the new text, and a function that maps positions in the old text to positions in the new text.
    """
    pieces, last, shifts, shift = [], 0, [], 0
    for start, end, new in replacements:
        pieces += [text[last:start], new]
        last = end
        shift += len(new) - (end - start)
        shifts.append((end, shift))

    def shift_position(position: int) -> int:
        return position + max(((end, shift) for end, shift in shifts if end <= position), default=(0, 0))[1]

    return "".join([*pieces, text[last:]]), shift_position
