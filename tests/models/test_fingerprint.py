"""Fingerprints of components: equal for copies in other folders, different after any change that affects loading."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from wfm_ds.models.assets.weight_files import END_BYTES, fingerprint_folders

PARTS = ("text_encoder", "tokenizer")


@pytest.fixture
def folder(tmp_path, tiny_pipelines):
    shutil.copytree(tiny_pipelines("sd3"), tmp_path / "copy")
    return tmp_path / "copy"


def test_a_copy_is_equal_and_other_parts_do_not_matter(folder, tiny_pipelines):
    before = fingerprint_folders(tiny_pipelines("sd3"), PARTS)
    (folder / "vae" / "config.json").write_text("{}")
    (folder / "text_encoder" / "pytorch_model.bin").write_text("never loaded")
    assert fingerprint_folders(folder, PARTS[::-1]) == before
    assert fingerprint_folders(folder, [*PARTS, "vae"]) != before


@pytest.mark.parametrize("change", ["config", "tokenizer", "weights", "name"])
def test_every_change_changes_the_fingerprint(folder, change):
    before = fingerprint_folders(folder, PARTS)
    if change == "config":
        path = folder / "text_encoder" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    elif change == "tokenizer":
        path = next(p for p in sorted((folder / "tokenizer").iterdir()) if p.is_file())
        path.write_bytes(path.read_bytes() + b"\n")
    elif change == "weights":
        path = folder / "text_encoder" / "model.safetensors"
        tensors = load_file(path)
        next(iter(tensors.values())).view(-1)[0] += 1
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        (folder / "tokenizer" / "more.json").write_text("")
    assert fingerprint_folders(folder, PARTS) != before


def test_only_the_ends_of_large_files_are_read(tmp_path):
    """Files that differ only in the middle get equal fingerprints; this avoids reading gigabytes."""
    (tmp_path / "vae").mkdir()
    path = tmp_path / "vae" / "model.safetensors"
    save_file({"a": torch.zeros(3 * END_BYTES // 4 + 8)}, path)
    prints = {fingerprint_folders(tmp_path, ["vae"])}
    content = bytearray(path.read_bytes())
    for position in (1 << 19, len(content) - 5):
        changed = bytearray(content)
        changed[position] = 1
        path.write_bytes(changed)
        prints.add(fingerprint_folders(tmp_path, ["vae"]))
    assert len(prints) == 3
    content[len(content) // 2] = 1
    path.write_bytes(content)
    assert fingerprint_folders(tmp_path, ["vae"]) in prints
