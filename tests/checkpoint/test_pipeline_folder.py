"""A pipeline folder written next to its base: which files are links to the base folder, and which are copies."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from wfm_ds.errors import ModelError
from wfm_ds.export.pipeline_folder import link_unchanged_files, pipeline_components, read_index

SHM = Path("/dev/shm")


@pytest.fixture
def base(tmp_path):
    """Write a pipeline with two components, a shard in a subfolder, and unrelated files."""
    folder = tmp_path / "base"
    index = {
        "_class_name": "StableDiffusion3Pipeline",
        "boundary_ratio": 0.5,
        "sizes": [1, 2, 3],
        "text_encoder_3": [None, None],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name in ("transformer/config.json", "vae/config.json", "vae/parts/1.bin", "README.md", "junk/big.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def files(folder):
    return {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if not f.is_dir()}


def test_index_names_the_components(base):
    assert pipeline_components(read_index(base)) == {
        "text_encoder_3": (None, None),
        "transformer": ("diffusers", "SD3Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    }


def test_only_unchanged_components_and_the_index_are_linked(base, tmp_path):
    link_unchanged_files(base, tmp_path / "out", changed=("transformer",))
    shared = files(tmp_path / "out")
    assert set(shared) == {"model_index.json", "vae/config.json", "vae/parts/1.bin"}
    assert all(shared[name].samefile(base / name) for name in shared)
    (base / "call.json").write_text("{}")
    link_unchanged_files(base, tmp_path / "second", changed=())
    assert set(files(tmp_path / "second")) == {*shared, "call.json", "transformer/config.json"}


def test_links_of_a_hub_cache_become_files_that_outlive_it(base, tmp_path):
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    base.rename(blobs)
    for name, file in files(blobs).items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(file, (snapshot / name).parent))
    link_unchanged_files(snapshot, tmp_path / "out", changed=("transformer",))
    shutil.rmtree(snapshot)
    shutil.rmtree(blobs)
    shared = files(tmp_path / "out")
    assert not any(file.is_symlink() for file in shared.values())
    assert shared["vae/parts/1.bin"].read_text() == "vae/parts/1.bin"


@pytest.mark.skipif(
    not os.access(SHM, os.W_OK) or SHM.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev,
    reason="needs /dev/shm as a second file system",
)
def test_another_file_system_gets_copies_and_one_warning(base, caplog):
    with tempfile.TemporaryDirectory(dir=SHM) as away:
        link_unchanged_files(base, Path(away) / "out", changed=("transformer",))
        copied = files(Path(away) / "out")
        assert {name: file.read_text() for name, file in copied.items()} == {
            name: (base / name).read_text() for name in ("model_index.json", "vae/config.json", "vae/parts/1.bin")
        }
    (record,) = caplog.records
    assert "3 unchanged files" in record.getMessage()
    assert "were copied, because they cannot be hard-linked" in record.getMessage()


def test_other_errors_of_linking_are_not_hidden_by_a_copy(base, tmp_path, monkeypatch):
    def full_disk(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full_disk)
    with pytest.raises(OSError, match="No space left"):
        link_unchanged_files(base, tmp_path / "out", changed=())


def test_missing_component_is_named(base, tmp_path):
    shutil.rmtree(base / "vae")
    with pytest.raises(ModelError, match=r"base/vae: the model index lists this component, but"):
        link_unchanged_files(base, tmp_path / "out", changed=("transformer",))


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_folder_without_a_readable_index_is_refused(base, text):
    (base / "model_index.json").unlink()
    if text is not None:
        (base / "model_index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model_index\.json: .* must be a diffusers pipeline folder"):
        read_index(base)
