"""The edit demo, as run by `make quickstart-edits`."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from commands import run_command_of_report
from wfm_ds.cli.quickstart import prepare_folder, run_rl, run_sft, write_report
from wfm_ds.demos import edits_data
from wfm_ds.demos.edits import IMAGE_FILE, EditsDemo


@pytest.mark.slow
@pytest.mark.long
def test_edits_are_trained_and_shown_and_diffusers_edits_with_the_export(tmp_path, root, monkeypatch):
    """Run a few steps of everything. benchmarks/learning/edits.py measures the full demo."""
    monkeypatch.chdir(root)
    small = tuple(replace(one, num_sources=n) for one, n in zip(edits_data.EDIT_SETS, (120, 24, 8), strict=True))
    monkeypatch.setattr(edits_data, "EDIT_SETS", small)
    folder, demo = tmp_path / "quickstart", EditsDemo()
    prepare_folder(demo, folder)
    sft_result = run_sft(demo, folder, folder / "sft", 0, "run.steps=3")
    few = ("run.steps=2", "rollout.prompts_per_step=2", "validation.seeds=[1, 2]", "validation.every=1")
    for name in ("nft", "nft_preservation"):
        result = run_rl(demo, folder, folder / name, sft_result, 0, *few)
        write_report(demo, folder, folder / name, seconds=1.0)
        report = (folder / "report.md").read_text()
        assert len(re.findall(r"^\| .* \| -?[\d.]+ \| -?[\d.]+ \|$", report, re.M)) == 6
        assert (folder / "index.html").read_text().count("<circle") == 4 * 3
    assert (folder / IMAGE_FILE).exists()

    run_command_of_report(report, "--seeds", "1")
    assert len(list((folder / "more").glob("[0-9]*.png"))) == edits_data.NUM_PROMPTS

    pipeline = DiffusionPipeline.from_pretrained(result["artifacts"]["pipeline"])
    source = folder / "data" / "held_out" / "sources" / "0001.png"
    images = [
        pipeline(Image.open(file), "invert the left digit", 64, 128, 2, generator=torch.manual_seed(0)).images[0]
        for file in (source, source.with_name("0002.png"))
    ]
    assert np.asarray(images[0]).shape == (64, 128, 3)
    assert (np.asarray(images[0]) != np.asarray(images[1])).any()
