"""Prompt sets for reinforcement learning and validation: files of prompts, and the order in which they are asked.

None is shipped; the formats are those of the published sets. A line that cannot be used is an error, not a skip: ids
hold line numbers, and a set of prompts is small enough to repair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.data.order import sample_index
from wfm_ds.data.samples import is_encodable, printable
from wfm_ds.errors import DataError
from wfm_ds.seeds import derive_seed
from wfm_ds.storage.regular import read_regular
from wfm_ds.types import Prompt

QUOTED = re.compile(r'"([^"]*)"')
NUM_SHOWN = 10

ParseLine = Callable[[str, str], Prompt]
"""(id, stripped line) to a prompt; raises ValueError with what is wrong with the line."""


@dataclass(frozen=True, slots=True)
class Format:
    """Storage of one published set: its file, by preference if it has several names, and the meaning of a line."""

    files: tuple[str, ...] = ("{split}.txt", "{split}.jsonl")
    parse: ParseLine | None = None  # None: as PARSERS has it for the suffix


def load_prompts(folder: Path, name: str, split: str) -> list[Prompt]:
    """Read the prompts of set `name` in its published format; ids are `name/split/line number`.

    pickscore: {split}.txt, a prompt a line. ocr: the same, with the text in the first double quotes as metadata
    `ocr_target`. geneval: {split}_metadata.jsonl or {split}.jsonl, the whole object as metadata. dance_grpo_t2v:
    {split}.txt, else video_prompts.txt. Any other name: {split}.txt, or {split}.jsonl with `prompt`, where
    `negative_prompt` is understood and the other keys are metadata. UTF-8; blank lines are skipped.
    Raises DataError for a missing folder or file, an empty file, and lines that cannot be used (with their numbers).
    """
    if not folder.is_dir():
        raise DataError(f"data.path {folder} is not a folder: it must hold the prompt file of the set {name}")
    known = FORMATS.get(name)
    how = known or Format()
    candidates = [folder / file.format(split=split) for file in how.files]
    found = [path for path in candidates if path.is_file()]
    if not found:
        wanted = " nor ".join(path.name for path in candidates)
        there = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in PARSERS)[:NUM_SHOWN]) or "none"
        raise DataError(f"{folder} has no {wanted} (data.name {name}, data.split {split}); prompt files there: {there}")
    if known is None and len(found) > 1:
        raise DataError(f"{folder} has both {found[0].name} and {found[1].name}: remove one, or use another data.split")
    return read_prompts(found[0], f"{name}/{split}", how.parse)


def load_prompt_file(path: Path) -> list[Prompt]:
    """Read the prompts of any .txt file (a prompt a line) or .jsonl file (`prompt` in each object).

    Ids are `file name without suffix/line number`. Raises DataError as load_prompts does.
    """
    if path.suffix not in PARSERS:
        raise DataError(f"{path} is neither a .txt (a prompt a line) nor a .jsonl (objects with `prompt`) file")
    return read_prompts(path, printable(path.stem), None)


class PromptOrder:
    """Order of the prompts of RL steps. Every prompt once per epoch; where an epoch ends inside a step, the next
    begins.

    A step that spans two epochs, or is longer than one, may hold a prompt twice.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("there is no prompt to ask for")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """Return the prompts of RL step `step` (from 1), `count` in each step; the same on every rank."""
        return self._at((step - 1) * count, count, self._seed)

    def further(self, step: int, count: int, attempt: int) -> list[Prompt]:
        """Return `count` more prompts for that step, other ones for each `attempt`, from 1: of an order of its own, in
        which each comes once an epoch too, or without shuffling those that follow. They follow from the arguments."""
        return self._at((step - 1 + attempt) * count, count, derive_seed(self._seed, "further_prompts", attempt))

    def _at(self, position: int, count: int, seed: int) -> list[Prompt]:
        places = range(position, position + count)
        return [self._prompts[sample_index(p, len(self._prompts), seed, self._shuffle)] for p in places]


def read_prompts(path: Path, id_prefix: str, parse: ParseLine | None) -> list[Prompt]:
    parse = parse or PARSERS[path.suffix]
    prompts: list[Prompt] = []
    wrong: list[str] = []
    for number, line in numbered_lines(path):
        try:
            prompts.append(parse(f"{id_prefix}/{number}", line))
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        more = f"; and {len(wrong) - NUM_SHOWN} more lines" if len(wrong) > NUM_SHOWN else ""
        raise DataError(f"{path}: {'; '.join(wrong[:NUM_SHOWN])}{more}")
    if not prompts:
        raise DataError(f"{path} holds no prompt: it is empty or blank")
    return prompts


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield stripped lines that are not blank, with their numbers from 1. Only line feeds separate lines."""
    try:
        raw = read_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {number} is not UTF-8; save the file in that encoding") from error
        if text:
            yield number, text


def plain_line(prompt_id: str, line: str) -> Prompt:
    return Prompt(id=prompt_id, text=line)


def ocr_line(prompt_id: str, line: str) -> Prompt:
    quoted = QUOTED.search(line)
    if quoted is None or not quoted[1].strip():
        raise ValueError("no text between double quotes to be drawn")
    return Prompt(id=prompt_id, text=line, metadata={"ocr_target": quoted[1].strip()})


def json_line(prompt_id: str, line: str) -> Prompt:
    record = json_object(line)
    negative = record.get("negative_prompt")
    if not isinstance(negative, str | None):
        raise ValueError("`negative_prompt` is not a string")
    metadata = {key: value for key, value in record.items() if key not in ("prompt", "negative_prompt")}
    return Prompt(id=prompt_id, text=record["prompt"].strip(), negative_text=negative, metadata=metadata)


def geneval_line(prompt_id: str, line: str) -> Prompt:
    record = json_object(line)
    return Prompt(id=prompt_id, text=record["prompt"].strip(), metadata=record)


def json_object(line: str) -> dict[str, Any]:
    """Parse one JSON object with a non-empty string `prompt`; else ValueError."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if not is_encodable(record):
        raise ValueError("text that UTF-8 cannot encode (half of a surrogate pair, \\ud800 to \\udfff)")
    text = record.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no `prompt`, which must be a non-empty string")
    return record


PARSERS: dict[str, ParseLine] = {".txt": plain_line, ".jsonl": json_line}
FORMATS = {
    "pickscore": Format(files=("{split}.txt",)),
    "ocr": Format(files=("{split}.txt",), parse=ocr_line),
    "geneval": Format(files=("{split}_metadata.jsonl", "{split}.jsonl"), parse=geneval_line),
    "dance_grpo_t2v": Format(files=("{split}.txt", "video_prompts.txt")),
}
