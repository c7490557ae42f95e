"""Parser of conversations: LLaVA annotations, and rows with `messages`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wfm_ds.data.samples import is_encodable, media_from_path
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import convert_storage_errors, is_remote, open_filesystem, shorten_path
from wfm_ds.storage.json_lines import split_lines

Role = Literal["system", "user", "assistant"]
MediaKind = Literal["image", "video"]
ROLES: Mapping[str, Role] = {
    **{"human": "user", "gpt": "assistant"},
    **{"system": "system", "user": "user", "assistant": "assistant"},
}
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video")
UNENCODABLE = "\ud800"  # not valid in UTF-8; `is_encodable` returns False for a row that contains it
TAG = re.compile(r"<(image|video)>")
SUFFIXES = (".json", ".jsonl")
REASONS = {
    "row": "not a JSON object with `conversations` or `messages`",
    "no_answer": "no question followed by an answer",
    "turn": "turn with an unknown role, out of order, or without text",
    "no_media": "more <image> or <video> tags than images or videos in the row",
    "media": "missing or damaged image or video, or extreme aspect ratio",
    "too_long": "more tokens than data.max_tokens",
}


class BadConversation(DataError):
    """An unusable annotation row. It is skipped and counted under `reason`, one of REASONS."""

    def __init__(self, reason: str, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail} ({reason})")
        self.reason = reason
        self.name = name


@dataclass(frozen=True, slots=True)
class MediaReference:
    """An image or video in a conversation, by path or s3:// address."""

    kind: MediaKind
    address: str


Part: TypeAlias = str | MediaReference


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation: its role, and its texts, images and videos in order."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: an optional system turn, then alternating user and assistant turns."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def media(self) -> list[MediaReference]:
        return [part for turn in self.turns for part in turn.parts if isinstance(part, MediaReference)]


def annotation_files(paths: Sequence[str]) -> list[str]:
    """Return the annotation files at these paths. An s3:// path that ends with a slash is a folder.

    Raises DataError for a folder without annotation files.
    """
    files: list[str] = []
    for path in paths:
        is_folder = path.endswith("/") if is_remote(path) else Path(path).is_dir()
        matches = _list_files(path) if is_folder else [path]
        if not matches:
            raise DataError(f"{path}: no {' or '.join(SUFFIXES)} file in this folder")
        files += matches
    return files


def _list_files(folder: str) -> list[str]:
    if not is_remote(folder):
        return sorted(str(path) for path in Path(folder).iterdir() if path.suffix in SUFFIXES)
    fs, path = open_filesystem(folder)
    with convert_storage_errors(folder):
        names = fs.ls(path.rstrip("/"), detail=False)
    return sorted(f"s3://{name}" for name in names if name.endswith(SUFFIXES))


def read_content(file: str, num_bytes: int = -1) -> bytes:
    """Return the content of a file, or its first `num_bytes`. Raises DataError if reading fails."""
    try:
        with media_from_path(file).open() as opened:
            return opened.read(num_bytes)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}); data.path must list .json or .jsonl files") from error


def parse_rows(file: str, content: bytes) -> tuple[Iterator[tuple[str, Any]], int]:
    """Return an iterator over (name, row) for all rows of an annotation file, and the number of rows.

    The rows of a .jsonl file are parsed one by one; the row is None for an invalid line. Raises DataError if a .json
    file does not contain a list.
    """
    if file.endswith(".jsonl"):
        lines = list(split_lines(content))
        return ((f"{file}:{number}", _json_or_none(line)) for number, line in lines), len(lines)
    rows = _json_or_none(content)
    if not isinstance(rows, list):
        raise DataError(f"{file}: not a JSON list of conversations in UTF-8; use a .jsonl file for one row per line")
    return ((f"{file}[{number}]", row) for number, row in enumerate(rows)), len(rows)


def read_rows(file: str | Path) -> Iterator[tuple[str, Any]]:
    return parse_rows(str(file), read_content(str(file)))[0]


def _json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content, parse_int=_parse_integer)
    except (ValueError, RecursionError):
        return None


def _parse_integer(digits: str) -> int | str:
    """Parse an integer. Return a string, which makes the row unusable, if it has more digits than Python allows."""
    try:
        return int(digits)
    except ValueError:
        return UNENCODABLE


def parse_conversation(
    row: Any, name: str, *, root: str | None = None, system_prompt: str | None = None
) -> Conversation:
    """Parse an annotation row. Raises BadConversation if the row is unusable.

    root: folder of images and videos with relative paths. system_prompt: used for rows that have no system prompt.
    """
    if not isinstance(row, dict) or not is_encodable(row):
        raise BadConversation("row", name, "not a JSON object")
    entries = row.get("conversations", row.get("messages"))
    if not isinstance(entries, list):
        raise BadConversation("row", name, "no conversations or messages")
    listed = {kind: _list_paths(row, kind, name) for kind in MEDIA_KINDS}
    turns = _assign_media([_parse_turn(entry, name) for entry in entries], listed, name, root)
    if system_prompt is not None and turns and turns[0].role != "system":
        turns = [Turn("system", (system_prompt,)), *turns]
    _check_order(turns, name)
    return Conversation(f"{name}#{row['id']}" if "id" in row else name, tuple(turns))


def _list_paths(row: Mapping[str, Any], kind: MediaKind, name: str) -> list[str]:
    value = row.get(kind) or row.get(f"{kind}s") or []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise BadConversation("row", name, f"{kind} must be a path or a list of paths")
    return values


def _parse_turn(entry: Any, name: str) -> Turn:
    if not isinstance(entry, dict):
        raise BadConversation("turn", name, "a turn is not a JSON object")
    role = ROLES.get(str(entry.get("from", entry.get("role"))).lower())
    content = entry.get("value", entry.get("content"))
    if role is None or not isinstance(content, str | list):
        raise BadConversation("turn", name, f"a turn of {entry.get('from', entry.get('role'))!r} without text")
    if isinstance(content, list):
        return Turn(role, tuple(_parse_part(part, name) for part in content))
    if role == "assistant":  # <image> is plain text in answers
        return Turn(role, (content,))
    pieces = TAG.split(content)  # text, kind, text, kind, text
    parts = [MediaReference("image" if p == "image" else "video", "") if i % 2 else p for i, p in enumerate(pieces)]
    return Turn(role, tuple(part for part in parts if part != ""))


def _parse_part(part: Any, name: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    for media_kind in MEDIA_KINDS:
        if kind == media_kind:
            path = part.get(media_kind, part.get("path"))
            return MediaReference(media_kind, path if isinstance(path, str) else "")
    raise BadConversation("turn", name, f"content type {kind!r} is not text, image or video")


def _assign_media(
    turns: Sequence[Turn], listed: Mapping[MediaKind, Sequence[str]], name: str, root: str | None
) -> list[Turn]:
    """Locate all images and videos. The n-th tag of a kind gets the n-th listed file of this kind.

    If the row lists more files than it has tags, the surplus files at the start of the list are inserted before the
    first question, as in LLaVA.
    """
    tags = Counter(p.kind for turn in turns for p in turn.parts if isinstance(p, MediaReference) and not p.address)
    remaining: dict[MediaKind, Iterator[str]] = {}
    untagged: list[Part] = []
    for kind, paths in listed.items():
        spare = len(paths) - tags[kind]
        if spare < 0:
            raise BadConversation("no_media", name, f"{tags[kind]} <{kind}> tags, {len(paths)} {kind}s")
        for path in paths[:spare]:
            untagged += [_locate(kind, path, name, root), "\n"]
        remaining[kind] = iter(paths[spare:])
    result = []
    for turn in turns:
        parts = [
            part
            if isinstance(part, str)
            else _locate(part.kind, part.address or next(remaining[part.kind]), name, root)
            for part in turn.parts
        ]
        if untagged and turn.role == "user":
            parts, untagged = [*untagged, *parts], []
        result.append(Turn(turn.role, tuple(parts)))
    return result


def _locate(kind: MediaKind, path: str, name: str, root: str | None) -> MediaReference:
    if is_remote(path) and not path.startswith("s3://"):
        raise BadConversation("media", name, f"{shorten_path(path)} is neither a path nor an s3:// address")
    if root is not None and not is_remote(path) and not path.startswith("/"):
        path = f"{root.rstrip('/')}/{path}"
    return MediaReference(kind, path)


def _check_order(turns: Sequence[Turn], name: str) -> None:
    dialogue = turns[1:] if turns and turns[0].role == "system" else turns
    misplaced = [
        t.role for t, role in zip(dialogue, ("user", "assistant") * len(dialogue), strict=False) if t.role != role
    ]
    if misplaced:
        raise BadConversation("turn", name, f"a turn of {misplaced[0]} out of order: user and assistant must alternate")
    if len(dialogue) < 2:
        raise BadConversation("no_answer", name, "no answer")
