"""Published prompt sets: where they come from, and how to download and check them.

Each file is pinned to a commit of a GitHub repository and checked against its git blob id.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wfm_ds.data.prompts import PARSERS, PROMPT_FORMATS, ParseLine, read_prompts
from wfm_ds.errors import DataError
from wfm_ds.storage.atomic import sync_to_disk, write_text

RAW_URL = "https://raw.githubusercontent.com"
MIRROR = "WFM_PROMPTS_URL"
"""Environment variable with the address of a mirror that has the same paths as RAW_URL."""
NOTE_FILE = "SOURCE.md"
CHANGED_REMARK = "differs from the published file (changed, or with invalid lines left blank)"
CHUNK_BYTES = 1 << 16
TIMEOUT_S = 20.0  # maximum time to connect to one address of the server, and maximum time without receiving data
NUM_TRIES = 5


@dataclass(frozen=True, slots=True)
class PromptFile:
    name: str  # file name in the folder of the prompt set
    path: str  # path in the repository
    blob: str  # git's blob id of the content: SHA-1 of `blob SIZE\0` and the content


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A published prompt set: its files at one commit of a GitHub repository."""

    repository: str
    commit: str
    licence: str  # of the repository; prompts from other sources may have another licence; see `remark`
    remark: str
    files: tuple[PromptFile, ...]


def flow_grpo_source(name: str, remark: str, blobs: Mapping[str, str]) -> PromptSource:
    """Return a prompt set of Flow-GRPO. blobs: {file name: blob id}."""
    files = tuple(PromptFile(file, f"dataset/{name}/{file}", blob) for file, blob in blobs.items())
    return PromptSource("yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd", "MIT", remark, files)


PROMPT_SOURCES = {
    "ocr": flow_grpo_source(
        "ocr",
        "Descriptions of images with a text to render, from Flow-GRPO (arXiv 2505.05470).",
        {
            "train.txt": "3ce0521b77b0a9031191d66ecc36ebaaf27a3922",
            "test.txt": "8deb4f8d8f2e863f45353354243669b3c991a6a2",
        },
    ),
    "geneval": flow_grpo_source(
        "geneval",
        "Prompts with the objects that the image must show, from Flow-GRPO, for the GenEval reward (arXiv 2310.11513).",
        {
            "train_metadata.jsonl": "0b97e8a6802c08fc7537cd00c76ae79c851bddcb",
            "test_metadata.jsonl": "27cdaf5cc1356fe15aeadbb8df55682ca74228f0",
        },
    ),
    "pickscore": flow_grpo_source(
        "pickscore",
        "Prompts of users, from Flow-GRPO, for the PickScore reward (arXiv 2305.01569). Some are explicit.",
        {
            "train.txt": "a437bd921c03fbc00c4e7ce148ae2d28fcd6e49b",
            "test.txt": "45f05231b969fb5f74c8debd606b22cd3be27f8e",
        },
    ),
    "dance_grpo_t2v": PromptSource(
        "XueZeyue/DanceGRPO",
        "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344",
        "Apache-2.0",
        "Prompts of users, selected by DanceGRPO (arXiv 2505.07818) from VidProM (arXiv 2403.06098), which has the "
        "licence CC BY-NC 4.0. Some are explicit.",
        (PromptFile("train.txt", "assets/video_prompts.txt", "2a7457f2d7b59ff7915be588de1ddb8fa95c8028"),),
    ),
}
"""{data.name: published prompt set}."""


def missing_bytes(name: str, folder: Path) -> int:
    """Ask the server for the total size of a prompt set's missing files, in bytes. Raises DataError."""
    total = 0
    for file in PROMPT_SOURCES[name].files:
        if (folder / file.name).is_file():
            continue
        request = urllib.request.Request(file_url(PROMPT_SOURCES[name], file), method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                total += int(response.headers.get("Content-Length") or 0)
        except (OSError, http.client.HTTPException) as error:
            raise download_error(request.full_url, folder / file.name, error) from error
    return total


def file_url(source: PromptSource, file: PromptFile) -> str:
    base = os.environ.get(MIRROR, "").rstrip("/") or RAW_URL
    return f"{base}/{source.repository}/{source.commit}/{file.path}"


def download_error(url: str, path: Path, error: Exception) -> DataError:
    reason = str(getattr(error, "reason", "") or error or type(error).__name__)
    return DataError(
        f"{url} cannot be downloaded ({reason}): set {MIRROR} to a mirror, or copy the file to {path} from a machine "
        "with a network"
    )


def download_prompt_set(name: str, folder: Path) -> Iterator[str]:
    """Download a published prompt set. Yield a line of text for each file: path and number of prompts.

    Existing files are kept. Lines that `load_prompts` cannot read become blank. Writes SOURCE.md with the source,
    licence and checksums. Raises DataError if the server cannot be reached or a file is not the published one.
    """
    source, parse = PROMPT_SOURCES[name], PROMPT_FORMATS[name][1]
    folder.mkdir(parents=True, exist_ok=True)
    note = [f"# Prompt set {name}", "", source.remark, ""]
    note += [f"* From https://github.com/{source.repository}, commit {source.commit}.", f"* Licence: {source.licence}."]
    for file in source.files:
        path, remark = folder / file.name, ""
        if path.is_file():
            is_published = git_blob_id(path.read_bytes()) == file.blob
            remark = ", already here" if is_published else f", already here, {CHANGED_REMARK}"
        else:
            num_blank = _download_prompt_file(file_url(source, file), path, file.blob, parse or PARSERS[path.suffix])
            remark = f", invalid lines left blank: {num_blank}" if num_blank else ""
        yield f"{path}: {len(read_prompts(path, name, parse))} prompts{remark}"
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        note.append(f"* {file.name}: {file.path}{remark}, sha256 {sha256}.")
    write_text(folder / NOTE_FILE, "\n".join([*note, ""]))


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _download_prompt_file(url: str, path: Path, blob: str, parse: ParseLine) -> int:
    """Download a file unless another process has done so, and return the number of invalid lines, now blank."""
    part = path.with_name(f".{path.name}.part")
    with part.open("ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks; the check of the content finds a mixture
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            part.unlink(missing_ok=True)
            return 0
        _download_file(url, part, path)
        content = part.read_bytes()
        if git_blob_id(content) != blob:
            part.unlink()
            raise DataError(f"{url} is not the published file (git blob {blob}): try again, or use another mirror")
        lines = content.split(b"\n")
        readable = [line if _is_readable(line, parse) else b"" for line in lines]
        num_blank = sum(new != old and bool(old.strip()) for new, old in zip(readable, lines, strict=True))
        if num_blank:
            part.write_bytes(b"\n".join(readable))
        sync_to_disk(part)
        part.replace(path)
        return num_blank


def _is_readable(line: bytes, parse: ParseLine) -> bool:
    try:
        parse("", line.decode().strip())
    except ValueError:
        return False
    return True


def _download_file(url: str, part: Path, final: Path) -> None:
    """Download a URL to the file `part`, after the bytes that `part` already has. Raises DataError."""
    problem: Exception | None = None
    for _ in range(NUM_TRIES):
        try:
            _append_rest(url, part)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # the part already has all bytes
                return
            problem = error
            if error.code < http.client.INTERNAL_SERVER_ERROR:
                break
        except urllib.error.URLError as error:
            problem = error
            if isinstance(error.reason, TimeoutError):  # a firewall drops the packets; a repetition would wait again
                break
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            problem = error
        except OSError as error:
            raise DataError(
                f"{part} cannot be written ({error.strerror}): free space, or use another folder"
            ) from error
        else:
            return
    assert problem is not None
    raise download_error(url, final, problem) from problem


def _append_rest(url: str, part: Path) -> None:
    have = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        is_rest = response.status == http.client.PARTIAL_CONTENT
        expected = response.headers.get("Content-Length")
        with part.open("ab" if is_rest else "wb") as out:
            num_bytes = sum(out.write(chunk) for chunk in iter(lambda: response.read(CHUNK_BYTES), b""))
    if expected is not None and num_bytes < int(expected):
        raise http.client.IncompleteRead(b"", int(expected) - num_bytes)
