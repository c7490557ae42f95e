"""Reads prompt files for RL and validation."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wfm_ds.data.samples import is_encodable, to_printable
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import read_regular
from wfm_ds.storage.json_lines import split_lines
from wfm_ds.types import Prompt

QUOTED = re.compile(r'"([^"]*)"')
NUM_SHOWN = 10

ParseLine = Callable[[str, str], Prompt]
"""Function that parses (id, stripped line) and returns a prompt. Raises ValueError if the line is invalid."""


def load_prompts(folder: Path, name: str, split: str) -> list[Prompt]:
    """Read the prompt set `name` in its published file format. Ids are `name/split/line number`.

    pickscore: {split}.txt with one prompt per line.
    ocr: {split}.txt with one prompt per line. The text in the first double quotes becomes the metadata `ocr_target`.
    geneval: {split}_metadata.jsonl or {split}.jsonl. The whole object becomes metadata.
    dance_grpo_t2v: {split}.txt, or video_prompts.txt if it does not exist.
    Any other name: {split}.txt, or {split}.jsonl with `prompt` and optional `negative_prompt`. Other keys: metadata.

    Blank lines are skipped. Raises DataError if the folder or file is missing, empty or invalid.
    """
    download = ""
    if name in PROMPT_FORMATS:
        download = f"; to download the published set: wfm data prompts {name} {shlex.quote(str(folder))}"
    if not folder.is_dir():
        raise DataError(f"data.path {folder} is not a folder: it must contain the prompt file of {name}{download}")
    names, parse = PROMPT_FORMATS.get(name, (("{split}.txt", "{split}.jsonl"), None))
    candidates = [folder / file.format(split=split) for file in names]
    files = [path for path in candidates if path.is_file()]
    if not files:
        wanted = " or ".join(path.name for path in candidates)
        available = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in PARSERS)[:NUM_SHOWN]) or "none"
        raise DataError(
            f"{folder} has no {wanted} (data.name {name}, data.split {split}); prompt files: {available}{download}"
        )
    if name not in PROMPT_FORMATS and len(files) > 1:
        raise DataError(f"{folder} has both {files[0].name} and {files[1].name}: remove one or change data.split")
    return read_prompts(files[0], f"{name}/{split}", parse)


def load_prompt_file(path: Path) -> list[Prompt]:
    """Read a .txt or .jsonl prompt file. Ids are `FILE_STEM/line number`. Raises DataError like load_prompts."""
    if path.suffix not in PARSERS:
        raise DataError(
            f"{path} is neither a .txt file (one prompt per line) nor a .jsonl file (objects with `prompt`)"
        )
    return read_prompts(path, to_printable(path.stem), None)


def read_prompts(path: Path, id_prefix: str, parse: ParseLine | None) -> list[Prompt]:
    """Read all prompts of a file. parse: line parser. None selects it by file suffix.

    Raises DataError that lists the invalid lines.
    """
    parse = parse or PARSERS[path.suffix]
    prompts: list[Prompt] = []
    errors: list[str] = []
    for number, line in read_lines(path):
        try:
            prompts.append(parse(f"{id_prefix}/{number}", line))
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        rest = f"; and {len(errors) - NUM_SHOWN} more lines" if len(errors) > NUM_SHOWN else ""
        raise DataError(f"{path}: {'; '.join(errors[:NUM_SHOWN])}{rest}")
    if not prompts:
        raise DataError(f"{path} has no prompts: the file is empty or blank")
    return prompts


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, stripped line) of the lines that are not blank. Raises DataError if not UTF-8."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in split_lines(content):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {number} is not UTF-8; save the file as UTF-8") from error
        if text:
            yield number, text


def parse_plain_line(prompt_id: str, line: str) -> Prompt:
    return Prompt(id=prompt_id, text=line)


def parse_ocr_line(prompt_id: str, line: str) -> Prompt:
    quoted = QUOTED.search(line)
    if quoted is None or not quoted[1].strip():
        raise ValueError("no text in double quotes to render")
    return Prompt(id=prompt_id, text=line, metadata={"ocr_target": quoted[1].strip()})


def parse_json_line(prompt_id: str, line: str) -> Prompt:
    record = parse_prompt_object(line)
    negative = record.get("negative_prompt")
    if not isinstance(negative, str | None):
        raise ValueError("`negative_prompt` is not a string")
    metadata = {key: value for key, value in record.items() if key not in ("prompt", "negative_prompt")}
    return Prompt(id=prompt_id, text=record["prompt"].strip(), negative_text=negative, metadata=metadata)


def parse_geneval_line(prompt_id: str, line: str) -> Prompt:
    record = parse_prompt_object(line)
    return Prompt(id=prompt_id, text=record["prompt"].strip(), metadata=record)


def parse_prompt_object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if not is_encodable(record):
        raise ValueError("text that cannot be encoded as UTF-8 (half of a surrogate pair, \\ud800 to \\udfff)")
    text = record.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no `prompt` (must be a non-empty string)")
    return record


PARSERS: dict[str, ParseLine] = {".txt": parse_plain_line, ".jsonl": parse_json_line}
# Published prompt sets: {name: (file names in order of preference, line parser or None to choose it by suffix)}
PROMPT_FORMATS: dict[str, tuple[tuple[str, ...], ParseLine | None]] = {
    "pickscore": (("{split}.txt",), None),
    "ocr": (("{split}.txt",), parse_ocr_line),
    "geneval": (("{split}_metadata.jsonl", "{split}.jsonl"), parse_geneval_line),
    "dance_grpo_t2v": (("{split}.txt", "video_prompts.txt"), None),
}
