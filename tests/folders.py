"""Folders by what is in their files."""

import json


def contents(folder):
    """Every file below `folder` by its relative path: its bytes, of safetensors the header's values and the rest. Their
    library writes the header's metadata in another order each time."""
    return {path.relative_to(folder): content(path) for path in folder.rglob("*") if path.is_file()}


def content(path):
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]
