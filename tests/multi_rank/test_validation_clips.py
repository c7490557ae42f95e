"""`validation.clips`: validation samples of several clips equal clips made one by one, on one rank and on two."""

import json
from pathlib import Path

import av
import pytest

from long_videos import NUM_CLIPS, psnr_by_clip, write_long_videos
from multi_rank.resuming import train_on_rank
from multi_rank.same_runs import assert_same_runs, records
from wfm_ds.demos.actions_data import write_files

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "world" / "nft.yaml"
SEED = 1000001
SHORT = [
    *("run.steps=1", "optimizer.eps=1e-4", "logging.console=false", "logging.num_samples=2", "validation.every=0"),
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "engine.max_forward_batch=4", "data.max_bad_fraction=0.5"),
    "sampling.eval_steps=3",
    *(f"validation.seeds=[{SEED}]", f"validation.clips={NUM_CLIPS}", "validation.num_prompts=4"),
    *("reward.functions=[{name: brightness}]", "algorithm.updates_per_rollout=1"),
]


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Return (folder, frames of each video, moves of each video)."""
    folder = tmp_path_factory.mktemp("videos")
    return folder, *write_long_videos(folder)


def settings(out, folder, tiny_pipelines, *changes):
    paths = [f"run.output_dir={out}", f"model.path={tiny_pipelines('world')}", f"data.path={folder}"]
    held_out = [f"validation.path={folder}", "validation.held_out_rewards=[consistency, continuation]"]
    return {"recipe": str(RECIPE), "overrides": [*paths, *held_out, *SHORT, *changes]}


def test_samples_of_several_clips_are_scored_by_clip(one_rank, two_ranks, tiny_pipelines, videos, tmp_path):
    folder, frames, moves = videos
    shared = "engine.sequence_parallel=2"
    for name, ranks, changes in (("one", one_rank, []), ("two", two_ranks, []), ("shared", two_ranks, [shared])):
        ranks.run(train_on_rank, **settings(tmp_path / name, folder, tiny_pipelines, *changes))
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert_same_runs(tmp_path / "one", tmp_path / "shared")
    found = records(tmp_path / "one")[0]
    rows = [json.loads(line) for line in (tmp_path / "one/samples/step_0/samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    by_clip = psnr_by_clip(tiny_pipelines("world"), frames, moves, SEED).mean(0)
    for k, psnr in enumerate(by_clip, 1):
        assert found[f"val/recording/psnr/clip_{k:02}"] == pytest.approx(psnr, abs=0.02)
        assert f"val/reward/brightness/clip_{k:02}" in found
        assert f"val/held_out/consistency/clip_{k:02}" in found
        # The VAE of this pipeline reproduces frames, so the reward compares with the recording itself.
        assert found[f"val/held_out/continuation/psnr_db/clip_{k:02}"] == pytest.approx(psnr, abs=0.02)
    assert found["val/recording/psnr/mean"] == pytest.approx(by_clip.mean(), abs=0.02)
    assert found["val/recording/psnr/drift"] == pytest.approx(by_clip[2] - by_clip[0], abs=0.04)
    assert found["val/recording/psnr/failed"] == 0
    assert {tag for tag in found if tag.startswith("val/recording/ssim")} == {
        *(f"val/recording/ssim/clip_{k:02}" for k in range(1, 4)),
        *(f"val/recording/ssim/{name}" for name in ("mean", "failed", "drift")),
    }
    with av.open(str(tmp_path / "one/samples/step_0" / rows[0]["file"])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 25


@pytest.mark.long
def test_one_clip_has_the_metrics_of_before(one_rank, tiny_pipelines, videos, tmp_path):
    """The first of several clips has the scores of a single clip, which reports nothing by clip."""
    folder, frames, moves = videos
    (tmp_path / "short").mkdir()
    for number, (video, one) in enumerate(zip(frames, moves, strict=True)):
        write_files(tmp_path / "short", number, video[:9], one[:2])
    single = ["validation.clips=1", f"validation.path={tmp_path / 'short'}"]
    one_rank.run(train_on_rank, **settings(tmp_path / "one", folder, tiny_pipelines, *single))
    one_rank.run(train_on_rank, **settings(tmp_path / "three", folder, tiny_pipelines))
    single, long = records(tmp_path / "one")[0], records(tmp_path / "three")[0]
    assert not [tag for tag in single if "clip_" in tag or "recording" in tag or "drift" in tag]
    for name in ("reward/brightness", "held_out/consistency", "held_out/continuation"):
        assert single[f"val/{name}/mean"] == pytest.approx(long[f"val/{name}/clip_01"], rel=1e-6)
