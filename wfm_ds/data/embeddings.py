"""Text embeddings that come with a Cosmos folder, and `python -m wfm_ds.data.embeddings FOLDER --from-pickle`.

The command writes NAME.safetensors beside each NAME.pickle, so that no run has to open a pickle. A pickle is a program;
here it can build numpy arrays of numbers, lists and plain values, and nothing else.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from wfm_ds.data.cosmos import EMBEDDING_FOLDERS, PICKLE_SUFFIXES, SAFE_SUFFIX, files_by_id
from wfm_ds.errors import DataError
from wfm_ds.program import program, say_error
from wfm_ds.storage import atomic
from wfm_ds.storage.regular import read_regular

KEY = "prompt_embeds"  # of the tensor in a safetensors file
# What numpy's own pickles name, before version 2 and since, protocols 3 to 5.
ADMITTED = frozenset(
    {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        *(
            (f"numpy.{core}.{module}", name)
            for core in ("core", "_core")
            for module, name in (
                ("multiarray", "_reconstruct"),
                ("numeric", "_frombuffer"),
            )
        ),
    }
)
# What a crafted pickle may raise besides: it calls the admitted names with arguments of its choice.
PICKLE_ERRORS = (
    UnpicklingError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    ImportError,
    MemoryError,
    OverflowError,
    RecursionError,
    SystemError,  # of a dtype whose state has another length
    SyntaxError,  # of a dtype whose name is no literal
)


class ArrayUnpickler(Unpickler):
    """Unpickler that refuses every name but those of numpy's array reconstruction."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_pickle(path: Path) -> npt.NDArray[np.floating[Any]]:
    """Read the embedding [n, D] of a pickle that holds an array of floats, or a list of one. DataError for anything
    else."""
    try:
        content = ArrayUnpickler(io.BytesIO(read_regular(path))).load()
    except PICKLE_ERRORS as error:
        raise DataError(f"{path} holds no plain arrays, so it is not opened: {error}") from error
    if isinstance(content, list | tuple) and len(content) == 1:
        (content,) = content
    if not isinstance(content, np.ndarray) or not np.issubdtype(content.dtype, np.floating):
        raise DataError(f"{path} holds no array of floats and no list of one")
    embedding = content[0] if content.ndim == 3 and len(content) == 1 else content
    if embedding.ndim != 2:
        raise DataError(f"{path} holds an array of shape {list(content.shape)}, an embedding is [n, D]")
    return np.ascontiguousarray(embedding)


def convert(folder: Path) -> tuple[int, list[str]]:
    """Write what is missing beside the pickles of a Cosmos folder: the number of files written, and what is wrong."""
    written, wrong = 0, list[str]()
    for name in EMBEDDING_FOLDERS:
        for paths in files_by_id(folder / name, frozenset(PICKLE_SUFFIXES)).values():
            safe = paths[0].with_suffix(SAFE_SUFFIX)
            if safe.exists():
                continue
            try:
                write_safetensors(safe, read_pickle(paths[0]))
                written += 1
            except DataError as error:
                wrong.append(str(error))
    return written, wrong


def write_safetensors(path: Path, embedding: npt.NDArray[np.floating[Any]]) -> None:
    with atomic.new_file(path) as part:
        save_file({KEY: embedding}, part)


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm_ds.data.embeddings", description="Convert a Cosmos folder's pickled text embeddings."
    )
    p.add_argument("folder", type=Path, help=f"a Cosmos folder with {' or '.join(EMBEDDING_FOLDERS)}")
    p.add_argument("--from-pickle", action="store_true", required=True, help="read NAME.pickle, write NAME.safetensors")
    return p


def run(args: argparse.Namespace) -> int:
    folder = args.folder
    if not any((folder / name).is_dir() for name in EMBEDDING_FOLDERS):
        raise DataError(f"{folder} has no folder {' or '.join(EMBEDDING_FOLDERS)}")
    written, wrong = convert(folder)
    sys.stdout.write(f"{written} embeddings written below {folder}\n")
    return max((say_error(sentence) for sentence in wrong), default=0)


if __name__ == "__main__":
    sys.exit(main())
