import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from commands import wfm_command
from families import CASES, each_family, load_reference_pipeline
from wfm_ds.errors import ModelError
from wfm_ds.models import tiny

main = wfm_command("models tiny")
TIMEOUT_S = 300
WRITE_ALL = """
import sys
from pathlib import Path
from wfm_ds.models.tiny import FAMILIES, write_tiny_model
for family in FAMILIES:
    write_tiny_model(family, Path(sys.argv[1]) / family)
"""


def fingerprint(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_pipeline(family, pipeline, call):
    """Return the pipeline's image, or the first frame of its video."""
    pipeline.set_progress_bar_config(disable=True)
    if "i2v" in family.split("_"):
        call = call | {"image": Image.new("RGB", (32, 32), "red")}  # JSON cannot hold an image
    asked = CASES[family].required_call_kwargs or (lambda pixels: {})
    pixels = torch.zeros(1, 3, call.get("num_frames", 1), 32, 32)
    call = call | {name: of_each[0] for name, of_each in asked(pixels).items()}
    output = pipeline(**call, generator=torch.Generator().manual_seed(0), output_type="pt")
    if hasattr(output, "video"):
        return output.video[:1]
    if hasattr(output, "images"):
        return output.images
    return output.frames[:, 0] if output.frames.ndim == 5 else output.frames[:1]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path):
    environments = [os.environ | {"PYTHONHASHSEED": seed} for seed in ("1", "2")]
    folders = [tmp_path / "first", tmp_path / "second"]
    started = [
        subprocess.Popen([sys.executable, "-c", WRITE_ALL, str(folder)], env=environment)
        for folder, environment in zip(folders, environments, strict=True)
    ]
    assert [process.wait(TIMEOUT_S) for process in started] == [0, 0]
    first, second = (fingerprint(folder) for folder in folders)
    assert first == second
    assert {name.split("/")[0] for name in first} == set(tiny.FAMILIES)
    assert all(f"{family}/call.json" in first for family in tiny.FAMILIES)


@each_family(tiny.FAMILIES)
def test_the_saved_pipeline_generates_the_images_of_the_one_in_memory(tiny_pipelines, family):
    folder = tiny_pipelines(family)
    pipeline, call = tiny.build_tiny_pipeline(family)
    reloaded = load_reference_pipeline(folder, CASES[family])
    pipeline.register_modules(**CASES[family].extra_components)
    stored = json.loads((folder / "call.json").read_text())
    assert stored == call
    image = run_pipeline(family, reloaded, stored)
    torch.testing.assert_close(image, run_pipeline(family, pipeline, call), rtol=0, atol=1e-5)
    assert image.shape == (1, 3, call["height"], call["width"])
    assert image.std() > 0.01


def test_sizes_are_as_documented():
    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    sd3, digits = (tiny.build_tiny_pipeline(family)[0] for family in ("sd3", "digits"))
    assert (count(sd3.transformer), count(digits.transformer), count(digits.vae)) == (87_168, 1_295_180, 666)


def test_writing_a_pipeline_does_not_change_random_states(tmp_path):
    torch.manual_seed(1)
    want = torch.rand(4)
    torch.manual_seed(1)
    tiny.write_tiny_model("sd3", tmp_path / "sd3")
    assert torch.equal(torch.rand(4), want)


def test_a_used_folder_is_not_changed(tmp_path, capsys):
    note = tmp_path / "note.txt"
    note.write_text("mine")
    assert main(["sd3", str(tmp_path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    with pytest.raises(ModelError, match="not an empty folder"):
        tiny.write_tiny_model("sd3", note)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    assert note.read_text() == "mine"


def test_the_command_writes_into_an_empty_folder(tmp_path, capsys):
    assert main(["digits", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "digits" in captured.out
    assert captured.err == ""
    assert (tmp_path / "model_index.json").is_file()


def test_the_command_lists_its_families(tmp_path, capsys):
    assert main(["sdxl", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error == f"error: sdxl is not a tiny pipeline; use one of {', '.join(tiny.FAMILIES)}\n"
    assert not (tmp_path / "out").exists()
