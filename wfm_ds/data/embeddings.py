"""`wfm data embeddings FOLDER --from-pickle`: write NAME.safetensors next to each NAME.pickle of a Cosmos folder.

Loading a pickle can execute code. The unpickler of this module creates only numpy arrays, lists and plain values.
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

from wfm_ds.data.captioned_folder import EMBEDDING_FOLDERS, PICKLE_SUFFIXES, SAFE_SUFFIX
from wfm_ds.data.file_lists import files_by_id
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import DataError
from wfm_ds.program import print_error, run_command
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import read_regular

EMBEDDING_KEY = "prompt_embeds"  # name of the tensor in the safetensors file
# Functions and classes that pickles of numpy arrays refer to: numpy 1 and 2, pickle protocols 3 to 5.
ALLOWED_NAMES = {("numpy", "ndarray"), ("numpy", "dtype")}
ALLOWED_NAMES |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
ALLOWED_NAMES |= {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
# Errors of crafted pickles, which may call the allowed names with any arguments.
PICKLE_ERRORS = (
    UnpicklingError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    MemoryError,
    OverflowError,
    RecursionError,
    SystemError,  # dtype state of wrong length
    SyntaxError,  # dtype name that is not a literal
)


class ArrayUnpickler(Unpickler):
    """An unpickler that imports only the functions and classes that numpy needs to reconstruct arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_NAMES:
            raise UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def read_pickle(path: Path) -> npt.NDArray[np.floating[Any]]:
    """Read a float embedding [tokens, channels] from a pickle.

    Raises DataError unless the pickle contains one array, or a list with one array.
    """
    try:
        content = ArrayUnpickler(io.BytesIO(read_regular(path))).load()
    except PICKLE_ERRORS as error:
        raise DataError(f"{path} rejected, a pickle may contain only plain arrays: {error}") from error
    if isinstance(content, list | tuple) and len(content) == 1:
        (content,) = content
    if not isinstance(content, np.ndarray) or not np.issubdtype(content.dtype, np.floating):
        raise DataError(f"{path} contains neither an array of floats nor a list with one")
    embedding = content[0] if content.ndim == 3 and len(content) == 1 else content
    if embedding.ndim != 2:
        raise DataError(f"{path} contains an array of shape {list(content.shape)}, expected [n, D]")
    return np.ascontiguousarray(embedding)


def convert_pickles(folder: Path) -> tuple[int, list[str]]:
    """Convert the pickled embeddings of a Cosmos folder. A pickle is skipped if its safetensors file exists.

    Returns (number of files written, error messages).
    """
    num_written, errors = 0, list[str]()
    for name in EMBEDDING_FOLDERS:
        files = files_by_id(folder / name, PICKLE_SUFFIXES)
        with track_progress(files.values(), f"converting {name}", total=len(files)) as tracked:
            for paths in tracked:
                safe = Path(paths[0]).with_suffix(SAFE_SUFFIX)
                if safe.exists():
                    continue
                try:
                    embedding = read_pickle(Path(paths[0]))
                    with atomic.new_file(safe) as part:
                        save_file({EMBEDDING_KEY: embedding}, part)
                    num_written += 1
                except DataError as error:
                    errors.append(str(error))
    return num_written, errors


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm data embeddings", description="Convert a Cosmos folder's pickled text embeddings."
    )
    p.add_argument("folder", type=Path, help=f"Cosmos folder with {' or '.join(EMBEDDING_FOLDERS)}")
    p.add_argument(
        "--from-pickle", action="store_true", required=True, help="convert each NAME.pickle to NAME.safetensors"
    )
    return p


def run(args: argparse.Namespace) -> int:
    folder = args.folder
    if not any((folder / name).is_dir() for name in EMBEDDING_FOLDERS):
        raise DataError(f"{folder} has no subfolder {' or '.join(EMBEDDING_FOLDERS)}")
    num_written, errors = convert_pickles(folder)
    sys.stdout.write(f"{num_written} embeddings written below {folder}\n")
    return max((print_error(message) for message in errors), default=0)
