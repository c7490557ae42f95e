"""The long-video demo: its walks, and the report by clip."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from wfm_ds.demos import long_actions_data
from wfm_ds.demos.files import write_json_rows, write_video
from wfm_ds.demos.long_actions import IMAGE_FILE, LongActionsDemo
from wfm_ds.demos.long_actions_data import WalkSet, write_walks
from wfm_ds.demos.report_page import write_page
from wfm_ds.demos.shapes import load_video
from wfm_reward.brightness_demo import HEIGHT, WIDTH

LEVELS_PER_STEP = 0.4 * 127.5  # grey levels of one move


@pytest.fixture
def walks(tmp_path, monkeypatch):
    sets = (WalkSet("clips", 60, 1, max_skipped=11, wrong=0.5), WalkSet("walks", 30, 3, max_skipped=11))
    monkeypatch.setattr(long_actions_data, "WALK_SETS", (*sets, WalkSet("held_out", 6, 12)))
    assert write_walks(tmp_path / "data") == 90
    return tmp_path / "data"


def load_walk(video):
    """Return the grey level of each frame, and the moves [M] that the actions ask for."""
    frames = load_video(video).astype(int)
    assert (frames == frames[:, :1, :1, :1]).all()
    rows = json.loads(video.with_suffix(".json").read_text())
    actions = np.load(video.parent / rows["actions"])
    assert actions.shape == (len(frames) - 1, 3)
    moves = actions[::4] @ [-1, 0, 1]
    np.testing.assert_array_equal(actions.argmax(1) - 1, np.repeat(moves, 4))
    return frames[:, 0, 0, 0], moves


def test_actions_say_how_the_brightness_changes_and_never_lead_beyond_black_or_white(walks):
    for name, num_frames, fraction in (("clips", 9, (0.4, 0.85)), ("walks", 25, (1, 1)), ("held_out", 97, (1, 1))):
        right, starts = [], []
        for video in sorted((walks / name).glob("*.mkv")):
            grey, moves = load_walk(video)
            assert len(grey) == num_frames
            due = grey[0] + LEVELS_PER_STEP * np.cumsum(moves)
            assert (np.abs(due - 127.5) <= 128.5).all()  # a grey level is rounded
            right.append(np.abs(due - grey[4::4]).max() <= 1)
            starts.append(grey[0])
        assert fraction[0] <= np.mean(right) <= fraction[1]  # wrong actions are right by chance, too
        is_middle = np.abs(np.array(starts) - 127.5) < 0.2 * 127.5 + 1
        assert is_middle.all() == (name == "held_out")  # training data begins anywhere in a walk


def test_the_same_files_on_every_run(walks, tmp_path):
    write_walks(tmp_path / "again")
    files = sorted((tmp_path / "again").rglob("*.*"))
    assert len(files) == 3 * 96 + 2
    for file in files:
        assert file.read_bytes() == (walks / file.relative_to(tmp_path / "again")).read_bytes()


def write_run(run, first, kind="held_out"):
    """Write a run whose PSNR falls by one in each clip, and whose followed actions rise by a hundredth."""
    folder = run / "samples" / "step_3"
    folder.mkdir(parents=True)
    rows = []
    for k in range(8):  # two noise seeds of each of four walks
        write_video(folder / f"{k}.mkv", np.full((97, HEIGHT, WIDTH, 3), 10 * k + first, np.uint8), 8)
        rows.append({"prompt_id": f"{k % 4 + 1:04}", "file": f"{k}.mkv"})
    write_json_rows(folder / "samples.jsonl", rows)
    metrics = {f"val/recording/psnr/clip_{k:02}": first + 1.0 - k for k in range(1, 13)}
    metrics |= {f"val/{kind}/brightness/following/clip_{k:02}": first / 100 + k / 100 for k in range(1, 13)}
    write_json_rows(run / "metrics.jsonl", [{"step": 1}, {"step": 3} | metrics])
    (run / "result.json").write_text("{}")


@pytest.mark.slow
def test_the_report_compares_the_clips_of_all_runs(walks, tmp_path):
    folder = tmp_path / "long"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "held_out").symlink_to(walks / "held_out")
    for name, first, kind in (("sft", 20, "held_out"), ("nft_history", 30, "held_out"), ("nft_naive", 25, "reward")):
        write_run(folder / name, first, kind)
    demo = LongActionsDemo()
    report = demo.write_comparison(folder, folder / "nft_history")
    assert report[2:5] == [
        "| SFT | 20.0 | 17.0 | 13.0 | 9.0 | 0.210 | 0.320 |",
        "| RL on own history | 30.0 | 27.0 | 23.0 | 19.0 | 0.310 | 0.420 |",
        "| RL on own history, naive reward | 25.0 | 22.0 | 18.0 | 14.0 | 0.260 | 0.370 |",
    ]
    image = np.asarray(Image.open(folder / IMAGE_FILE).convert("RGB")).astype(int)
    assert image.shape[1] == 25 * (2 * WIDTH + 2) + 2
    row_height = image.shape[0] // 12  # 3 walks, each with its recording and the videos of 3 models
    bright = [image[(k + 1) * row_height - 8, 10, 0] for k in range(12)]
    recorded = [load_walk(walks / "held_out" / f"{k:04}.mkv")[0][0] for k in (1, 2, 3)]
    expected = [level for k in range(3) for level in (recorded[k], 10 * k + 20, 10 * k + 30, 10 * k + 25)]
    assert bright == expected

    write_page(demo, folder, folder / "nft_history", report)
    page = (folder / "index.html").read_text()
    assert page.count("<svg") == 2
    assert page.count("<circle") == 2 * 3 * 12
    assert f'src="{IMAGE_FILE}"' in page
    assert re.findall(r'href="(\w+)/index.html"', page) == ["nft_history", "nft_naive", "sft"]
