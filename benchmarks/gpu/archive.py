"""The results of a day as one file, to carry them from one machine to the next."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from wfm_ds.errors import UserError

MAX_BYTES = 16 * 2**20  # the largest file that a borrowed machine returns
MAX_LOG_BYTES = 100_000


def pack_results(folder: Path, file: Path) -> list[str]:
    """Write a day's folder to one archive below MAX_BYTES, atomically. Return the names of the files left out.

    Only the ends of long logs are included. Compile caches are left out, the largest first, if they do not fit.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != file and path.suffix != ".part")
    caches = sorted((path for path in paths if path.parent != folder), key=lambda path: path.stat().st_size)
    left_out: list[str] = []
    while len(packed := _pack(folder, paths)) >= MAX_BYTES:
        if not caches:
            raise UserError(f"the results in {folder} take {len(packed)} bytes, more than {MAX_BYTES}: remove logs")
        paths.remove(largest := caches.pop())
        left_out.append(str(largest.relative_to(folder)))
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_bytes(packed)
    part.replace(file)
    return left_out


def _pack(folder: Path, paths: list[Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in paths:
            content = path.read_bytes()
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            if path.suffix == ".log":
                content = content[-MAX_LOG_BYTES:]
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def unpack_results(file: Path, folder: Path, *, summaries: Collection[str] = ()) -> None:
    """Unpack an archive of `pack_results` into a day's folder, which may already have some of these results.

    summaries: names of JSON files that change with every result. Raises UserError if the archive cannot be read, or if
    it lacks a result of the folder or has another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(file) as archive:
            packed = {member.name: archive.extractfile(member) for member in archive.getmembers()}
            for path in sorted(folder.glob("*.json")):
                found = packed.get(path.name)
                if path.name not in summaries and (found is None or found.read() != path.read_bytes()):
                    raise UserError(
                        f"{file} would overwrite or miss the result {path}: remove --continue-from to continue in "
                        f"{folder}, or name a new folder with --out"
                    )
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{file} is not an archive of a day: {error}") from error
