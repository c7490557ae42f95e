"""Weights of published models: a folder or file on this machine, or an address on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import RewardError

T = TypeVar("T")


def loaded(reward: str, what: str, address: str, load: Callable[[str], T]) -> T:
    """Return `load` of a folder, or of the name of a repository on the hub. Raises RewardError with the way out."""
    path = Path(address).expanduser()
    try:
        return load(str(path) if path.exists() else address)
    except ImportError as error:
        raise RewardError(f"reward {reward} needs a package that is not installed: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RewardError(
            f"reward {reward}: {what} {address} cannot be loaded: {reason}. Set its option to where the weights are: a "
            "folder or file, or a name on the Hugging Face hub if that can be reached"
        ) from error


def file_of(address: str) -> str:
    """Return the path of a file, or of a fetched `OWNER/REPOSITORY:FILE` of the hub. Raises OSError or ValueError."""
    path = Path(address).expanduser()
    if path.is_file():
        return str(path)
    repository, found, file = address.partition(":")
    if not found:
        raise OSError(f"there is no file {path}, and it is not OWNER/REPOSITORY:FILE")
    from huggingface_hub import hf_hub_download

    return str(hf_hub_download(repository, file))


def pictures(media: npt.NDArray[np.uint8]) -> list[Any]:
    """PIL images of uint8 [B,H,W,3]."""
    from PIL import Image

    return [Image.fromarray(image) for image in media]


def torch_dtype(reward: str, name: str) -> Any:
    """Raises RewardError unless it is float32, bfloat16 or float16."""
    import torch

    if name not in ("float32", "bfloat16", "float16"):
        raise RewardError(f"reward {reward}: dtype is {name!r}; it must be float32, bfloat16 or float16")
    return getattr(torch, name)
