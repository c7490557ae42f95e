"""`wfm evaluate --data RECIPE --clips K`: scores by clip, the similarity to recordings, and the report."""

import csv
import json
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from commands import wfm_command
from long_videos import NUM_CLIPS, NUM_VIDEOS, psnr_by_clip, write_long_videos
from wfm_ds.cli import model_comparison

evaluate = wfm_command("evaluate")
RECIPE = Path(__file__).parent.parent.parent / "recipes" / "world" / "nft.yaml"


@pytest.fixture
def data(tmp_path):
    """Return (recipe file, frames of each video, moves of each video)."""
    (tmp_path / "videos").mkdir()
    videos = write_long_videos(tmp_path / "videos")
    text = RECIPE.read_text().replace("outputs/quickstart-world/data/held_out", str(tmp_path / "videos"))
    text = text.replace("outputs/quickstart-world/data/clips", str(tmp_path / "videos"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("  clip: centre", "  max_bad_fraction: 0.5"))
    return recipe, *videos


def copy_with_other_weights(pipeline, out):
    shutil.copytree(pipeline, out)
    (file,) = (out / "transformer").glob("*.safetensors")
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return out


def count_models(monkeypatch):
    """Return a list that receives the number of loaded models whenever `wfm evaluate` loads another one."""
    models, counts, stock = [], [], model_comparison.load_sampler

    def load_sampler(*args):
        counts.append(sum(model() is not None for model in models))
        sampler = stock(*args)
        models.append(weakref.ref(sampler.model))
        return sampler

    monkeypatch.setattr(model_comparison, "load_sampler", load_sampler)
    return counts


@pytest.mark.slow
def test_models_are_compared_clip_by_clip(tiny_pipelines, data, tmp_path, capsys, monkeypatch):
    counts = count_models(monkeypatch)
    recipe, frames, moves = data
    pipelines = [tiny_pipelines("world"), copy_with_other_weights(tiny_pipelines("world"), tmp_path / "other")]
    options = ["--data", recipe, "--clips", NUM_CLIPS, "--rewards", "brightness", "--held-out", "continuation"]
    options += ["--seeds", 2, "--steps", 3, "--diversity", "rgb", "--guardrail", "off", "--out", tmp_path / "out"]
    assert evaluate([*pipelines, *options]) == 0
    assert counts == [0, 0]  # one model in memory at a time
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    by_hand = [np.mean([psnr_by_clip(one, frames, moves, seed) for seed in (0, 1)], 0) for one in pipelines]
    base, other = content["clips"]["recording/psnr"].values()
    for found, psnr in ((base, by_hand[0]), (other, by_hand[1])):
        assert [one["value"] for one in found["means"]] == pytest.approx(list(psnr.mean(0)), abs=0.02)
        drifts = [one["value"] for one in found["drifts"]]
        assert drifts == pytest.approx([(psnr[:, k] - psnr[:, 0]).mean() for k in (1, 2)], abs=0.04)
    similarity = content["clips"]["continuation/psnr_db"]["other"]["means"]  # the VAE reproduces the recording
    assert [one["value"] for one in similarity] == pytest.approx(list(by_hand[1].mean(0)), abs=0.02)
    gaps = [one["value"] for one in other["differences"]]
    assert gaps == pytest.approx(list((by_hand[1] - by_hand[0]).mean(0)), abs=0.04)
    assert content["base"]["means"]["brightness"]["value"] == pytest.approx(
        np.mean([one["value"] for one in content["clips"]["brightness"]["world"]["means"]])
    )
    assert {"continuation", "brightness/following", "recording/ssim"} < content["clips"].keys()

    rows = list(csv.DictReader((tmp_path / "out" / "clips.csv").open()))
    assert len(rows) == 2 * NUM_VIDEOS * 2 * NUM_CLIPS
    last = [float(row["recording/psnr"]) for row in rows if (row["model"], row["clip"]) == ("other", "3")]
    assert np.mean(last) == pytest.approx(by_hand[1][:, 2].mean(), abs=0.02)

    table = next(part for part in printed.split("\n\n") if part.startswith("recording/psnr")).splitlines()
    assert table[0].split("  ")[-1] == "other - world"
    assert [line.split("  ")[0].strip() for line in table[1:]] == ["clip 1", "clip 2", "clip 3", "drift"]
    assert float(table[3].split()[2]) == pytest.approx(by_hand[0][:, 2].mean(), rel=5e-3)
    page = (tmp_path / "out" / "index.html").read_text()
    (chart,) = re.findall(r"<h3>recording/psnr</h3>\n(.*?)</svg>", page, re.DOTALL)
    assert len(re.findall("<circle", chart)) == 2 * NUM_CLIPS
    assert page.count("<video ") == 2 * NUM_VIDEOS * 2


def test_data_that_does_not_fit_is_refused(tiny_pipelines, data, tmp_path, capsys):
    recipe, *_ = data
    texts = tmp_path / "texts.yaml"
    texts.write_text((RECIPE.parent.parent / "cp_nft.yaml").read_text())
    for model, options, message in (
        ("world", ["--data", texts], "have no frames, input images or videos; use --prompts"),
        ("wan21", ["--data", recipe, "--height", "32", "--width", "32"], "--data: the recipe does not fit"),
        ("world", ["--data", recipe, "--clips", "4"], "all 4 validation samples are invalid"),
    ):
        common = ["--rewards", "motion", "--diversity", "rgb", "--out", tmp_path / "out"]
        guardrail = ["--guardrail", "off" if model == "world" else "stock"]
        assert evaluate([tiny_pipelines(model), *common, *guardrail, *options]) == 2
        assert message in capsys.readouterr().err
