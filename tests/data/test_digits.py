"""Data of the digits demo: exact files and prompts, and disjoint image splits for training and for the classifiers."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from wfm_ds.cli.main import main
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.pixels import Framing, draw_centre, load_image
from wfm_ds.data.prompts import load_prompts
from wfm_ds.demos.digits_data import all_digits, reward_split, sft_split, write_digits


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "out"
    assert write_digits(folder) == 899
    return folder


def test_the_folder_is_the_even_digits_exactly(out):
    images, labels = sft_split()
    samples = CaptionedFolder(out / "images", max_bad_fraction=0.0).samples
    assert [s.id for s in samples] == [f"{i:04}" for i in range(1, 900)]
    for sample, image, label in zip(samples, images, labels, strict=True):
        assert (sample.prompt.text, sample.prompt.metadata) == (f"the digit {label}", {"label": label})
        np.testing.assert_array_equal(
            load_image(sample.media, Framing(height=8, width=8), draw_centre), np.repeat(image[..., None], 3, axis=2)
        )


def test_the_prompts_are_the_ten_digits(out):
    prompts = load_prompts(out / "prompts", "digits", "train")
    assert [(p.text, p.metadata) for p in prompts] == [(f"the digit {d}", {"label": d}) for d in range(10)]


def test_the_splits_share_no_image_and_miss_none():
    images, labels = all_digits()
    assert (images.min(), images.max(), images.dtype, len(images)) == (0, 255, np.uint8, 1797)
    (even, even_labels), (odd, odd_labels) = sft_split(), reward_split()
    assert (len(even), len(odd)) == (899, 898)
    np.testing.assert_array_equal(np.concatenate([even, odd]), np.concatenate([images[::2], images[1::2]]))
    np.testing.assert_array_equal(
        np.concatenate([even_labels, odd_labels]), np.concatenate([labels[::2], labels[1::2]])
    )
    assert not {image.tobytes() for image in even} & {image.tobytes() for image in odd}


def fingerprint(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return len(files), hashlib.sha256("\n".join(parts).encode()).hexdigest()


def command(folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "wfm_ds", "data", "digits", str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_command_writes_the_same_bytes_again_and_refuses_a_used_folder(out, tmp_path):
    made = command(tmp_path / "again", PYTHONHASHSEED="7")
    assert (made.returncode, made.stderr) == (0, "")
    assert "899 captioned images" in made.stdout
    assert fingerprint(tmp_path / "again") == fingerprint(out)
    assert fingerprint(out)[0] == 2 * 899 + 2

    refused = command(tmp_path / "again")
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"error: {tmp_path / 'again'} exists and is not an empty folder: use a new folder or remove it\n"
    )


def test_an_empty_folder_may_exist_but_not_a_file(tmp_path):
    (tmp_path / "empty").mkdir()
    assert write_digits(tmp_path / "empty") == 899
    (tmp_path / "file").write_text("")
    assert main(["data", "digits", str(tmp_path / "file" / "below")]) == 2


HEAVY = ("torch", "diffusers", "deepspeed", "transformers", "sklearn")


def test_data_modules_import_nothing_heavy():
    code = (
        "import sys, wfm_ds.data.captioned_folder, wfm_ds.data.order, wfm_ds.data.prompts, wfm_ds.demos.digits_data\n"
        f"loaded = [m for m in {HEAVY} if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
