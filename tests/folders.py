"""Compare folders by file contents, and write files of training data."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

from wfm_ds.recipe.schema import Recipe


def contents(folder):
    """Return the content of every file in `folder` by relative path.

    Most files are returned as bytes. A safetensors file is returned as its parsed header and its remaining bytes,
    because the library writes header metadata in varying order.
    """
    return {path.relative_to(folder): content(path) for path in folder.rglob("*") if path.is_file()}


def content(path):
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put(folder, files):
    """Write files given by name as text, bytes, or None for an empty file. Dataset scans do not open media files."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else (content or "").encode())
    return folder


def write_tar(path, members, mode="w", format=tarfile.PAX_FORMAT):
    """Write a tar with the members (name, bytes). Duplicate names are allowed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def encode_image(pixels, kind="PNG"):
    """Encode pixels [H,W,3], or 8 x 8 pixels of one colour, as the bytes of an image file."""
    if isinstance(pixels, int | tuple):
        pixels = np.broadcast_to(np.uint8(pixels), (8, 8, 3))
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, kind)
    return file.getvalue()


def sft_recipe(data, num_frames=1, **validation):
    """Return an SFT recipe with the given `data` section."""
    sections = {"run": {"output_dir": "out", "steps": 1}, "model": {"path": "tiny:sd3"}, "data": data}
    sampling = {"height": 16, "width": 16, "num_frames": num_frames}
    sections |= {"sampling": sampling, "algorithm": {"name": "sft"}, "validation": validation}
    return Recipe.model_validate(sections)
