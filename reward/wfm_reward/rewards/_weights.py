"""Load the weights of published models from a local path or the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import RewardError

T = TypeVar("T")


def load_pretrained(reward: str, label: str, address: str, load: Callable[[str], T]) -> T:
    """Load a model from a local path or the Hub. Raises RewardError if a package is missing or loading fails.

    label: name of the model in the error message. load: function that receives the path or Hub name.
    """
    path = Path(address).expanduser()
    try:
        return load(str(path) if path.exists() else address)
    except ImportError as error:
        raise RewardError(f"reward {reward} needs a package that is not installed: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RewardError(
            f"reward {reward}: {label} {address} cannot be loaded: {reason}. Set the option to a local folder or file, "
            "or to a name on the Hugging Face Hub if this machine can reach it"
        ) from error


def resolve_file(address: str) -> str:
    """Return the path of a local file, or download OWNER/REPOSITORY:FILE. Raises OSError or ValueError."""
    path = Path(address).expanduser()
    if path.is_file():
        return str(path)
    repository, colon, file = address.partition(":")
    if not colon:
        raise OSError(f"file {path} not found, and the address is not OWNER/REPOSITORY:FILE")
    from huggingface_hub import hf_hub_download

    return str(hf_hub_download(repository, file))


def load_torch_file(address: str, *, mmap: bool = False) -> dict[str, Any]:
    """Load weights that `torch.save` wrote, from an address of `resolve_file`. Raises OSError or ValueError.

    mmap: read the weights only when they are used. Files of old torch versions do not support this.
    """
    import torch

    weights: dict[str, Any] = torch.load(resolve_file(address), map_location="cpu", weights_only=True, mmap=mmap)
    return weights


def load_lpips(reward: str, net: str, device: str, *, spatial: bool = False) -> Any:
    """Load LPIPS with the network alex, vgg or squeeze. It compares images [B,3,H,W] from -1 to 1.

    spatial: return a map of distances [B,1,H,W] instead of one distance per image [B,1,1,1].
    """

    def load_network(name: str) -> Any:
        import lpips

        return lpips.LPIPS(net=name, spatial=spatial, verbose=False).eval().to(device)

    return load_pretrained(reward, "the LPIPS network", net, load_network)


def to_lpips_tensor(images: npt.NDArray[np.uint8], device: str) -> Any:
    """Convert images [B,H,W,3] to the input of LPIPS, float32 [B,3,H,W] from -1 to 1."""
    import torch

    return torch.from_numpy(images).permute(0, 3, 1, 2).to(device).float() / 127.5 - 1


def to_pil_images(media: npt.NDArray[np.uint8]) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(image) for image in media]


def torch_dtype(reward: str, name: str) -> Any:
    import torch

    if name not in ("float32", "bfloat16", "float16"):
        raise RewardError(f"reward {reward}: dtype is {name!r}; it must be float32, bfloat16 or float16")
    return getattr(torch, name)
