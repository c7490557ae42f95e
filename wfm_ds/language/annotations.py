"""Parser for conversations: LLaVA annotations, and rows with `messages`. It also locates their images and videos."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wfm_ds.data.samples import is_encodable
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import convert_storage_errors, is_remote, open_filesystem

Role = Literal["system", "user", "assistant"]
MediaKind = Literal["image", "video"]
ROLES: Mapping[str, Role] = {
    **{"human": "user", "gpt": "assistant"},
    **{"system": "system", "user": "user", "assistant": "assistant"},
}
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video")
TAG = re.compile(r"<(image|video)>")
SUFFIXES = (".json", ".jsonl")
REASONS = {
    "row": "not a JSON object with `conversations` or `messages`",
    "no_answer": "no question followed by an answer",
    "turn": "turn with an unknown role, out of order, or without text",
    "no_media": "more <image> or <video> tags than media in the row",
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
    """The turns of a conversation: an optional system turn, then alternating user and assistant turns."""

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


def read_content(file: str) -> bytes:
    """Read an annotation file. Raises DataError if it cannot be read."""
    try:
        if not is_remote(file):
            return Path(file).read_bytes()
        fs, path = open_filesystem(file)
        with convert_storage_errors(file):
            content: bytes = fs.cat_file(path)
        return content
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}); data.path must list .json or .jsonl files") from error


def parse_rows(file: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield (name, row) for all rows of an annotation file. The row is None for a JSONL line that is not valid JSON.

    Raises DataError if the file is not UTF-8, or if a .json file does not contain a list.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: cannot be read ({error}); data.path must list .json or .jsonl files") from error
    if file.endswith(".jsonl"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{file}:{number}", _json_or_none(line)
        return
    rows = _json_or_none(text)
    if not isinstance(rows, list):
        raise DataError(f"{file}: not a JSON list of conversations; use a .jsonl file for one row per line")
    for number, row in enumerate(rows):
        yield f"{file}[{number}]", row


def read_rows(file: str | Path) -> Iterator[tuple[str, Any]]:
    """Read an annotation file and yield its rows like `parse_rows`. Raises DataError."""
    return parse_rows(str(file), read_content(str(file)))


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None


def parse_conversation(
    row: Any, name: str, *, root: str | None = None, system_prompt: str | None = None
) -> Conversation:
    """Parse an annotation row to a conversation. Raises BadConversation if the row is unusable.

    root: folder that relative media paths refer to. system_prompt: used for rows that have no system prompt.
    """
    if not isinstance(row, dict) or not is_encodable(row):
        raise BadConversation("row", name, "not a JSON object")
    entries = row.get("conversations", row.get("messages"))
    if not isinstance(entries, list):
        raise BadConversation("row", name, "no conversations or messages")
    media = _MediaSupply(row, name, root)
    turns = [_parse_turn(entry, media, name) for entry in entries]
    turns = media.resolve_media(turns)
    if system_prompt is not None and turns and turns[0].role != "system":
        turns = [Turn("system", (system_prompt,)), *turns]
    _check_order(turns, name)
    return Conversation(f"{name}#{row['id']}" if "id" in row else name, tuple(turns))


class _MediaSupply:
    """Assigns the images and videos that a row lists to the tags in its texts, such as <image>.

    The first tag gets the first file of its kind, and so on.
    """

    def __init__(self, row: Mapping[str, Any], name: str, root: str | None) -> None:
        self._name, self._root = name, root
        self._listed = {kind: self._list_paths(row, kind) for kind in MEDIA_KINDS}
        self._tags: list[tuple[MediaKind, int]] = []  # kind of each tag and its number within the kind
        self._num_tags = dict.fromkeys(MEDIA_KINDS, 0)

    def _list_paths(self, row: Mapping[str, Any], kind: MediaKind) -> list[str]:
        value = row.get(kind) or row.get(f"{kind}s") or []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise BadConversation("row", self._name, f"{kind} must be a path or a list of paths")
        return values

    def locate(self, kind: MediaKind, path: str) -> MediaReference:
        """Return a reference to an image or video. path: absolute, relative to the root, or an address."""
        full_path = path if self._root is None or "://" in path else f"{self._root.rstrip('/')}/{path}"
        return MediaReference(kind, path if path.startswith("/") else full_path)

    def add_tag(self, kind: MediaKind) -> MediaReference:
        """Return a placeholder for a tag. `resolve_media` replaces it when all tags of the row are known."""
        self._num_tags[kind] += 1
        return MediaReference(kind, "")

    def resolve_media(self, turns: Sequence[Turn]) -> list[Turn]:
        """Replace the placeholders by images and videos.

        If the row lists more files than it has tags, the first files are inserted before the first question, as in
        LLaVA.
        """
        remaining: dict[MediaKind, list[str]] = {}
        untagged: list[Part] = []
        for kind in MEDIA_KINDS:
            spare = len(self._listed[kind]) - self._num_tags[kind]
            if spare < 0:
                raise BadConversation(
                    "no_media",
                    self._name,
                    f"{self._num_tags[kind]} <{kind}> tags, {len(self._listed[kind])} {kind}s",
                )
            for path in self._listed[kind][:spare]:
                untagged += [self.locate(kind, path), "\n"]
            remaining[kind] = self._listed[kind][spare:]
        paths_by_kind, result = {kind: iter(paths) for kind, paths in remaining.items()}, []
        for turn in turns:
            parts = [
                self.locate(p.kind, next(paths_by_kind[p.kind]))
                if isinstance(p, MediaReference) and not p.address
                else p
                for p in turn.parts
            ]
            if untagged and turn.role == "user":
                parts, untagged = [*untagged, *parts], []
            result.append(Turn(turn.role, tuple(parts)))
        return result


def _parse_turn(entry: Any, media: _MediaSupply, name: str) -> Turn:
    if not isinstance(entry, dict):
        raise BadConversation("turn", name, "a turn is not a JSON object")
    role = ROLES.get(str(entry.get("from", entry.get("role"))).lower())
    content = entry.get("value", entry.get("content"))
    if role is None or not isinstance(content, str | list):
        raise BadConversation("turn", name, f"a turn of {entry.get('from', entry.get('role'))!r} without text")
    if isinstance(content, list):
        return Turn(role, tuple(_parse_part(part, media, name) for part in content))
    if role == "assistant":  # <image> is plain text in answers
        return Turn(role, (content,))
    pieces: list[Part] = []
    for i, piece in enumerate(TAG.split(content)):  # text, kind, text, kind, text
        if i % 2:
            pieces.append(media.add_tag("image" if piece == "image" else "video"))
        elif piece:
            pieces.append(piece)
    return Turn(role, tuple(pieces))


def _parse_part(part: Any, media: _MediaSupply, name: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    for media_kind in MEDIA_KINDS:
        if kind == media_kind:
            path = part.get(media_kind, part.get("path"))
            return media.locate(media_kind, path) if isinstance(path, str) and path else media.add_tag(media_kind)
    raise BadConversation("turn", name, f"content type {kind!r} is not text, image or video")


def _check_order(turns: Sequence[Turn], name: str) -> None:
    dialogue = turns[1:] if turns and turns[0].role == "system" else turns
    misplaced = [
        t.role for t, role in zip(dialogue, ("user", "assistant") * len(dialogue), strict=False) if t.role != role
    ]
    if misplaced:
        raise BadConversation("turn", name, f"a turn of {misplaced[0]} out of order: user and assistant must alternate")
    if len(dialogue) < 2:
        raise BadConversation("no_answer", name, "no answer")
