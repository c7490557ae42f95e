import html
import json
import re
from dataclasses import replace

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensorboard import plugin_util

from each_case import check_each
from wfm_ds.monitoring.media_files import GAP, TEXT_HEIGHT
from wfm_ds.monitoring.samples import (
    MAX_ANIMATED_CELL,
    MAX_ANIMATED_FRAMES,
    GeneratedSample,
    group_by_prompt,
    sample_animation,
    sample_grid,
    sample_table,
    write_samples,
)


def sample(seed, *, prompt="the digit 7", prompt_id="digits/7", rewards=None, size=8):
    image = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return GeneratedSample(prompt=prompt, prompt_id=prompt_id, seed=seed, pixels=image, rewards=rewards or {})


def clip(seed, num_frames=5, size=64, fps=8.0):
    """Return a video that starts dark and becomes lighter."""
    levels = np.linspace(0, 200, num_frames, dtype=np.uint8)[:, None, None, None]
    media = np.broadcast_to(levels, (num_frames, size, size, 3)).copy()
    return GeneratedSample(prompt=f"prompt {seed}", prompt_id=f"p{seed}", seed=seed, pixels=media, fps=fps)


def test_the_grid_has_a_row_per_prompt_if_all_have_equally_many_samples():
    samples = [sample(i, prompt_id=f"p{i // 3}", prompt=f"prompt {i // 3}") for i in range(6)]
    sheet = sample_grid(samples)
    assert sheet.shape == (2 * (TEXT_HEIGHT + 64 + GAP) + GAP, 3 * (64 + GAP) + GAP, 3)
    y, x = GAP + TEXT_HEIGHT + 64 + GAP + TEXT_HEIGHT, GAP + 2 * (64 + GAP)
    assert np.array_equal(sheet[y : y + 64 : 8, x : x + 64 : 8], samples[5].pixels)


def test_grid_of_single_samples_is_a_square_with_rewards_below():
    samples = [sample(i, prompt_id=f"p{i}", size=80, rewards={"ocr": None}) for i in range(9)]
    assert sample_grid(samples).shape == (3 * (80 + TEXT_HEIGHT + GAP) + GAP, 3 * (80 + GAP) + GAP, 3)


def test_table_has_a_column_per_reward_and_survives_markdown():
    table = sample_table(
        [sample(1, prompt="a | b\nc", rewards={"ocr": 0.51234, "color": None}), sample(2, rewards={"color": 1.0})]
    )
    assert table.splitlines() == [
        "|  | prompt | seed | ocr | color |",
        "| --- | --- | --- | --- | --- |",
        "| 0 | a \\| b c | 1 | 0.512 | failed |",
        "| 1 | the digit 7 | 2 |  | 1 |",
    ]


@check_each(
    "prompt",
    ["![x](http://a.b/c.png)", "<img src=http://a.b/c.png>", "![x][1]", "`*a* _b_ [c](http://d)`", "a \\| &amp; # {b}"],
)
def test_a_prompt_is_text_on_a_page_of_tensorboard(prompt):
    page = plugin_util.markdown_to_safe_html(sample_table([sample(1, prompt=prompt)]))
    cell = re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)[1]
    assert "<" not in cell
    assert html.unescape(cell) == prompt


def test_written_samples_are_images_with_their_metadata(tmp_path):
    samples = [
        sample(5, prompt="caf\u00e9 \u732b", rewards={"ocr": 0.5, "color": None}),
        sample(6, prompt_id="digits/8", rewards={"ocr": float("nan")}),
    ]
    folder = tmp_path / "samples" / "step_10"
    samples[0] = replace(samples[0], parts={"ocr/recall": 0.25, "ocr/precision": float("inf")})
    write_samples(folder, [sample(1)] * 3)
    write_samples(folder, samples)  # a resumed run writes the same step again
    assert sorted(path.name for path in folder.iterdir()) == ["0000.png", "0001.png", "samples.jsonl"]
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [
        {
            "file": "0000.png",
            "prompt": "caf\u00e9 \u732b",
            "prompt_id": "digits/7",
            "seed": 5,
            "rewards": {"ocr": 0.5, "color": None},
            "parts": {"ocr/recall": 0.25, "ocr/precision": None},
        },
        {"file": "0001.png", "prompt": "the digit 7", "prompt_id": "digits/8", "seed": 6, "rewards": {"ocr": None}},
    ]
    for row, original in zip(rows, samples, strict=True):
        assert np.array_equal(np.asarray(Image.open(folder / row["file"])), original.pixels)


def test_samples_that_cannot_be_written_leave_nothing(tmp_path):
    wrong = GeneratedSample(prompt="", prompt_id="", seed=0, pixels=np.zeros((8, 8, 3)), rewards={})
    with pytest.raises(TypeError, match="Cannot handle this data type"):
        write_samples(tmp_path / "step_1", [sample(1), wrong])
    assert list(tmp_path.iterdir()) == []


def test_samples_are_shown_prompt_by_prompt_in_their_own_order():
    samples = [sample(i, prompt_id=f"p{i % 3}") for i in range(6)]
    assert [s.seed for s in group_by_prompt(samples)] == [0, 3, 1, 4, 2, 5]


def test_written_videos_are_mp4_files_with_their_speed(tmp_path):
    one_frame = GeneratedSample(prompt="still", prompt_id="p9", seed=9, pixels=clip(0).pixels[:1], fps=8.0)
    write_samples(tmp_path / "step_1", [clip(0), one_frame])
    assert sorted(path.name for path in (tmp_path / "step_1").iterdir()) == ["0000.mp4", "0001.png", "samples.jsonl"]
    first, second = [json.loads(line) for line in (tmp_path / "step_1" / "samples.jsonl").read_text().splitlines()]
    assert (first["file"], first["fps"]) == ("0000.mp4", 8.0)
    assert second["file"] == "0001.png"
    assert "fps" not in second
    with av.open(str(tmp_path / "step_1" / "0000.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.stack(frames).astype(int) - clip(0).pixels).max() <= 3


def test_grid_of_videos_shows_their_first_frames():
    samples = [clip(i) for i in range(4)]
    stills = [GeneratedSample(prompt=s.prompt, prompt_id=s.prompt_id, seed=s.seed, pixels=s.pixels[0]) for s in samples]
    assert np.array_equal(sample_grid(samples), sample_grid(stills))


def test_the_animation_holds_the_last_frame_of_short_videos():
    video, fps = sample_animation([clip(0), clip(1, num_frames=3), sample(2, size=64), sample(3, size=64)])
    assert (len(video), fps) == (5, 8.0)
    assert np.array_equal(
        video[0], sample_grid([clip(0), clip(1, num_frames=3), sample(2, size=64), sample(3, size=64)])
    )
    y, x = GAP + 10, GAP + 64 + GAP + 10  # in the second cell
    assert [int(frame[y, x, 0]) for frame in video] == [0, 100, 200, 200, 200]
    assert (video[:, 2 * GAP + 64 :] == video[:1, 2 * GAP + 64 :]).all()  # the cells with images do not change


@given(st.integers(2, 150), st.integers(8, 400))
@settings(deadline=None, max_examples=15)
def test_animation_of_any_video_is_small_and_as_long_as_the_video(num_frames, size):
    video, fps = sample_animation([clip(0, num_frames=num_frames, size=size, fps=24.0)])
    assert len(video) <= MAX_ANIMATED_FRAMES
    assert max(video.shape[1:3]) <= MAX_ANIMATED_CELL + 2 * GAP
    assert len(video) / fps == pytest.approx(num_frames / 24, abs=num_frames / len(video) / 24)
