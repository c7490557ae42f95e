"""Conversations from LLaVA annotations and from rows with `messages`: who says what, and where media stand in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wfm_ds.data.samples import is_encodable
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import answering, filesystem, is_remote

Role = Literal["system", "user", "assistant"]
Kind = Literal["image", "video"]
ROLES: Mapping[str, Role] = {
    **{"human": "user", "gpt": "assistant"},
    **{"system": "system", "user": "user", "assistant": "assistant"},
}
KINDS: tuple[Kind, ...] = ("image", "video")
TAG = re.compile(r"<(image|video)>")
SUFFIXES = (".json", ".jsonl")
REASONS = {
    "row": "not an object with `conversations` or `messages`",
    "no_answer": "no question with an answer after it",
    "turn": "a turn that is neither system, human nor gpt, out of order, or not text",
    "no_media": "more <image> or <video> tags than the row has media",
    "media": "an image or video that is missing, damaged or out of all proportion",
    "too_long": "more tokens than data.max_tokens",
}


class BadConversation(DataError):
    """One row that cannot be used: skipped and counted under `reason`, one of REASONS."""

    def __init__(self, reason: str, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail} ({reason})")
        self.reason = reason
        self.name = name


@dataclass(frozen=True, slots=True)
class Medium:
    """One image or video of a conversation."""

    kind: Kind
    address: str


Part: TypeAlias = str | Medium


@dataclass(frozen=True, slots=True)
class Turn:
    """Texts and media that one side says, in their order."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in their order: system at most first, then user and assistant in turn."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def media(self) -> list[Medium]:
        return [part for turn in self.turns for part in turn.parts if isinstance(part, Medium)]


def annotation_files(paths: Sequence[str]) -> list[str]:
    """The annotation files at these paths and s3:// addresses, those of a folder by name, which in a storage ends with
    a slash. Raises DataError for one that is not there."""
    files: list[str] = []
    for path in paths:
        is_folder = path.endswith("/") if is_remote(path) else Path(path).is_dir()
        found = _files_in(path) if is_folder else [path]
        if not found:
            raise DataError(f"{path}: no {' or '.join(SUFFIXES)} file in it; name the folder of the annotations")
        files += found
    return files


def _files_in(folder: str) -> list[str]:
    if not is_remote(folder):
        return sorted(str(path) for path in Path(folder).iterdir() if path.suffix in SUFFIXES)
    fs, path = filesystem(folder)
    with answering(folder):
        names = fs.ls(path.rstrip("/"), detail=False)
    return sorted(f"s3://{name}" for name in names if name.endswith(SUFFIXES))


def content_of(file: str) -> bytes:
    """The bytes of an annotation file. Raises DataError."""
    try:
        if not is_remote(file):
            return Path(file).read_bytes()
        fs, path = filesystem(file)
        with answering(file):
            found: bytes = fs.cat_file(path)
        return found
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}); data.path names .json or .jsonl annotations") from error


def rows_in(file: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield (name, row) of all rows of a file; a line that is no JSON is a row too, None. Raises DataError for a file
    that is no text or no list."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: cannot be read ({error}); data.path names .json or .jsonl annotations") from error
    if file.endswith(".jsonl"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{file}:{number}", _json_or_none(line)
        return
    rows = _json_or_none(text)
    if not isinstance(rows, list):
        raise DataError(f"{file}: is not a JSON list of conversations; one row a line belongs into a .jsonl file")
    for number, row in enumerate(rows):
        yield f"{file}[{number}]", row


def rows_of(file: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file as `rows_in` does. Raises DataError for one that cannot be read."""
    return rows_in(str(file), content_of(str(file)))


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None


def parsed(row: Any, name: str, *, root: str | None = None, system_prompt: str | None = None) -> Conversation:
    """Make the conversation of a row. root: of relative media; system_prompt: the turn of rows without one.

    Raises BadConversation.
    """
    if not isinstance(row, dict) or not is_encodable(row):
        raise BadConversation("row", name, "is no JSON object")
    said = row.get("conversations", row.get("messages"))
    if not isinstance(said, list):
        raise BadConversation("row", name, "has neither conversations nor messages")
    media = _Supply(row, name, root)
    turns = [_turn(entry, media, name) for entry in said]
    turns = media.with_untagged(turns)
    if system_prompt is not None and turns and turns[0].role != "system":
        turns = [Turn("system", (system_prompt,)), *turns]
    _check_order(turns, name)
    return Conversation(f"{name}#{row['id']}" if "id" in row else name, tuple(turns))


class _Supply:
    """The media that a row lists, handed out to its tags in their order."""

    def __init__(self, row: Mapping[str, Any], name: str, root: str | None) -> None:
        self._name, self._root = name, root
        self._listed = {kind: self._list(row, kind) for kind in KINDS}
        self._tags: list[tuple[Kind, int]] = []  # of each tag its kind and its number among them
        self._num_tags = dict.fromkeys(KINDS, 0)

    def _list(self, row: Mapping[str, Any], kind: Kind) -> list[str]:
        value = row.get(kind) or row.get(f"{kind}s") or []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise BadConversation("row", self._name, f"{kind} is neither a path nor a list of paths")
        return values

    def located(self, kind: Kind, path: str) -> Medium:
        whole = path if self._root is None or "://" in path else f"{self._root.rstrip('/')}/{path}"
        return Medium(kind, path if path.startswith("/") else whole)

    def tagged(self, kind: Kind) -> Medium:
        """The place of a tag; which medium it is shows when all tags are known."""
        self._num_tags[kind] += 1
        return Medium(kind, "")

    def with_untagged(self, turns: Sequence[Turn]) -> list[Turn]:
        """Give all places their media. Those without a tag come first, before the first question, as LLaVA has it."""
        left: dict[Kind, list[str]] = {}
        first: list[Part] = []
        for kind in KINDS:
            spare = len(self._listed[kind]) - self._num_tags[kind]
            if spare < 0:
                raise BadConversation(
                    "no_media",
                    self._name,
                    f"{self._num_tags[kind]} <{kind}> tags, {len(self._listed[kind])} {kind}s",
                )
            for path in self._listed[kind][:spare]:
                first += [self.located(kind, path), "\n"]
            left[kind] = self._listed[kind][spare:]
        given, filled = {kind: iter(paths) for kind, paths in left.items()}, []
        for turn in turns:
            parts = [
                self.located(p.kind, next(given[p.kind])) if isinstance(p, Medium) and not p.address else p
                for p in turn.parts
            ]
            if first and turn.role == "user":
                parts, first = [*first, *parts], []
            filled.append(Turn(turn.role, tuple(parts)))
        return filled


def _turn(entry: Any, media: _Supply, name: str) -> Turn:
    if not isinstance(entry, dict):
        raise BadConversation("turn", name, "a turn is no JSON object")
    role = ROLES.get(str(entry.get("from", entry.get("role"))).lower())
    said = entry.get("value", entry.get("content"))
    if role is None or not isinstance(said, str | list):
        raise BadConversation("turn", name, f"a turn of {entry.get('from', entry.get('role'))!r} without text")
    if isinstance(said, list):
        return Turn(role, tuple(_part(part, media, name) for part in said))
    if role == "assistant":  # there <image> is a word like others
        return Turn(role, (said,))
    pieces: list[Part] = []
    for i, piece in enumerate(TAG.split(said)):  # text, kind, text, kind, text
        if i % 2:
            pieces.append(media.tagged("image" if piece == "image" else "video"))
        elif piece:
            pieces.append(piece)
    return Turn(role, tuple(pieces))


def _part(part: Any, media: _Supply, name: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    for known in KINDS:
        if kind == known:
            path = part.get(known, part.get("path"))
            return media.located(known, path) if isinstance(path, str) and path else media.tagged(known)
    raise BadConversation("turn", name, f"a part of type {kind!r}: it must be text, image or video")


def _check_order(turns: Sequence[Turn], name: str) -> None:
    said = turns[1:] if turns and turns[0].role == "system" else turns
    wrong = [t.role for t, role in zip(said, ("user", "assistant") * len(said), strict=False) if t.role != role]
    if wrong:
        raise BadConversation("turn", name, f"a turn of {wrong[0]} out of order: user and assistant speak in turn")
    if len(said) < 2:
        raise BadConversation("no_answer", name, "there is no answer")
