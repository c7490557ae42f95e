"""The reports of the shapes demo and the actions demo, from run folders without training."""

import re

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from wfm_ds.cli import generate
from wfm_ds.demos import actions, actions_data
from wfm_ds.demos.actions import NUM_SHOWN, SCALE, ActionsDemo
from wfm_ds.demos.actions_data import write_brightness
from wfm_ds.demos.files import write_json_rows, write_video
from wfm_ds.demos.report_page import write_page
from wfm_ds.demos.shapes import EVALUATION_TAG, FPS, JUDGE, METRICS, REWARD, ShapesDemo, load_video
from wfm_ds.demos.shapes_data import HELD_OUT_PAIRS, PAIRS
from wfm_ds.monitoring.samples import GeneratedSample, write_samples
from wfm_reward.brightness_demo import HEIGHT, NUM_FRAMES, WIDTH
from wfm_reward.moving_demo import MovingClip, draw_clip, render_frames


def write_metrics(run, *evaluations):
    write_json_rows(run / "metrics.jsonl", [{"step": 1, "loss/total": 1.0}, *evaluations])


def values(report):
    """Return {first cell: other cells} of the rows of the report's tables."""
    return {label: cells.split(" | ") for label, cells in re.findall(r"^\| (.+?) \| (.+) \|$", "\n".join(report), re.M)}


def shape_sample(shape, direction, start, *, shown, score):
    clip = MovingClip(shape, direction, start)
    parts = [name for name in METRICS.values() if "/" in name]
    return GeneratedSample(
        prompt=clip.prompt,
        prompt_id=clip.prompt,
        seed=start,
        fps=8.0,
        pixels=render_frames(draw_clip(MovingClip(shape, shown, start))),
        rewards={REWARD: score, JUDGE: 10 * score},
        parts=dict.fromkeys(parts, score / 2),
    )


def test_the_shapes_report_has_scores_of_both_kinds_of_pairs_and_equal_animations(tmp_path):
    run = tmp_path / "nft"
    for step, shown in ((0, "up"), (2, None)):  # before RL, all shapes move up
        samples = [
            shape_sample(*pair, start, shown=shown or pair[1], score=0.5 + step / 10 - 0.4 * (pair in HELD_OUT_PAIRS))
            for pair in PAIRS
            for start in (0, 1)
        ]
        write_samples(run / "samples" / f"step_{step}", samples)
    write_metrics(run, {"step": 0, EVALUATION_TAG: 0.4}, {"step": 2, EVALUATION_TAG: 0.6})
    report = ShapesDemo().write_comparison(tmp_path, run)
    gap = report.index("")
    trained, held_out = values(report[:gap]), values(report[gap:])
    assert trained["trained pairs, 18 videos"] == held_out["held-out pairs, 6 videos"] == ["before RL", "after RL"]
    assert (trained["reward"], held_out["reward"]) == (["0.50", "0.70"], ["0.10", "0.30"])
    assert trained["held-out reward: both are right"] == ["0.25", "0.35"]
    assert trained["held-out reward: PSNR to the nearest real clip, dB"] == ["5.00", "7.00"]
    starts = "correct starts hit, of 4, mean over prompts"
    assert (trained[starts], held_out[starts]) == (["0.67", "2.00"], ["0.00", "2.00"])

    assert report[-1].endswith("after.png. Animations: the same names as .gif and .mp4.")
    for name in ("before", "after"):
        with Image.open(tmp_path / f"{name}.gif") as file:
            gif = np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)]).astype(int)
        with av.open(str(tmp_path / f"{name}.mp4")) as container:
            assert container.streams.video[0].average_rate == FPS
        mp4 = load_video(tmp_path / f"{name}.mp4").astype(int)
        assert (len(gif), len(mp4)) == (5, 6)  # the GIF shows its last frame for longer
        assert all(size % 2 == 0 for size in mp4.shape[1:3])
        assert np.abs(mp4[:5, : gif.shape[1], : gif.shape[2]] - gif).mean() < 2
        assert np.abs(mp4[5] - mp4[4]).mean() < 2
        assert np.abs(mp4[4] - mp4[0]).mean() > 10


@pytest.fixture
def actions_folder(tmp_path, monkeypatch):
    """The folder of an actions demo with NUM_SHOWN + 1 held-out clips, and its RL run with two evaluations."""
    monkeypatch.setattr(actions_data, "NUM_CLIPS", 2)
    for module in (actions, actions_data):
        monkeypatch.setattr(module, "NUM_HELD_OUT", NUM_SHOWN + 1)
    write_brightness(tmp_path / "data")
    run = tmp_path / "nft"
    for step in (0, 2):
        folder = run / "samples" / f"step_{step}"
        folder.mkdir(parents=True)
        rows = [{"prompt_id": f"{k:04}", "file": f"{k}.mkv"} for k in range(NUM_SHOWN + 1, 0, -1)]
        for k, row in enumerate(rows):
            write_video(folder / row["file"], np.full((NUM_FRAMES, HEIGHT, WIDTH, 3), 100 * step + k, np.uint8), 8)
        write_json_rows(folder / "samples.jsonl", rows)
    parts = {"mean": 0.1, "following/mean": 0.2, "still/mean": 0.3, "residual/mean": 0.4}
    values = {f"val/reward/brightness/{name}": value for name, value in parts.items()}
    values["val/held_out/seen_action/mean"] = 0.5
    rows = [{"step": k} | {name: value + k / 10 for name, value in values.items()} for k in (0, 2)]
    write_metrics(run, *rows)
    return tmp_path


def test_the_actions_report_compares_generated_videos_with_real_clips(actions_folder):
    demo, run = ActionsDemo(), actions_folder / "nft"
    report = demo.write_comparison(actions_folder, run)
    assert values(report) == {
        "on held-out clips": ["before RL", "after RL"],
        "actions followed (chance .33)": ["0.200", "0.400"],
        "- actions without a change": ["0.300", "0.500"],
        "distance of the pixels from the nearest move, in steps": ["0.400", "0.600"],
        "held-out reward (inverse dynamics)": ["0.500", "0.700"],
    }
    for name, step in (("before", 0), ("after", 2)):
        image = np.asarray(Image.open(actions_folder / f"{name}.png"))
        levels = image[2 + SCALE * HEIGHT // 2 :: SCALE * HEIGHT + 2, 2 + SCALE * WIDTH // 2 :: SCALE * WIDTH + 2, 0]
        assert levels.shape == (2 * NUM_SHOWN, NUM_FRAMES)
        for k in range(NUM_SHOWN):
            clip = load_video(actions_folder / "data" / "held_out" / f"{NUM_SHOWN + 1 - k:04}.mkv")
            np.testing.assert_array_equal(levels[2 * k], clip[:, 0, 0, 0])
            assert (levels[2 * k + 1] == 100 * step + k).all()

    write_page(demo, actions_folder, run, report)
    page = (actions_folder / "index.html").read_text()
    assert re.findall(r'src="(\w+\.png)"', page) == ["before.png", "after.png"]
    assert "actions followed (chance .33)" in page
    words = f"--pipeline {run} {demo.generate_arguments(actions_folder)}".split()
    arguments = generate.parser().parse_args(words)
    start = load_video(actions_folder / "data" / "held_out" / f"{NUM_SHOWN + 1:04}.mkv")[0]
    np.testing.assert_array_equal(np.asarray(Image.open(arguments.first_frame)), start)
    assert len(np.load(arguments.actions)) == arguments.frames - 1
    assert arguments.prompts.is_file()
