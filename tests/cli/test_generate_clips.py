"""`wfm generate --clips`: a long video equals single calls of wfm generate that start with the last frame before."""

import json

import numpy as np
import pytest
from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w
from PIL import Image

from commands import wfm_command
from families import CASES
from wfm_ds.models.clips import clip_seed
from wfm_ds.monitoring import samples

LENS = ["24", "24", "16", "16"]
SEED, NUM_CLIPS = 5, 3


@pytest.fixture
def videos(monkeypatch):
    """Collect the exact pixels of all written videos. MP4 files are lossy."""
    written = []
    save = samples.save_mp4
    monkeypatch.setattr(
        samples, "save_mp4", lambda path, video, *more: written.append(video.copy()) or save(path, video, *more)
    )
    return written


def save_rows(folder, name, actions, camera, rows):
    """Write rows of the long actions and camera path, and return the options that read them."""
    options = []
    if actions is not None:
        np.save(folder / f"{name}_actions.npy", actions[rows.start : rows.stop - 1])
        options += ["--actions", folder / f"{name}_actions.npy", "--domain", "1"]
    if camera is not None:
        np.save(folder / f"{name}_camera.npy", camera[rows])
        options += ["--camera", folder / f"{name}_camera.npy", "--intrinsics", *LENS]
    return options


def generate(folder, name, options, family, tiny_pipelines):
    height, width, frames = CASES[family].size
    size = ["--height", height, "--width", width, "--frames", frames, "--steps", "2"]
    common = ["--model", tiny_pipelines(family), "--prompts", folder / "a.txt", *size]
    common += ["--guardrail", "off"] if CASES[family].load_options else []
    return wfm_command("generate")([*common, "--out", folder / name, *options])


@pytest.mark.parametrize(
    "family",
    [
        "cosmos3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("cosmos25", "sana_wm", "sana_video", "wan21_i2v", "wan22_ti2v")
        ),
    ],
)
def test_a_long_video_equals_single_calls_from_the_last_frame(family, tiny_pipelines, tmp_path, videos):
    height, width, frames = CASES[family].size
    total = NUM_CLIPS * (frames - 1) + 1
    draws = np.random.default_rng(3)
    actions = draws.normal(size=(total - 1, 9)) if family == "cosmos3" else None
    camera = action_string_to_c2w(f"w-{total // 2},jw-{total - 1 - total // 2}") if family == "sana_wm" else None
    (tmp_path / "a.txt").write_text("a cat\n")
    Image.fromarray(draws.integers(0, 256, (height, width, 3), np.uint8)).save(tmp_path / "frame0.png")
    given = ["--first-frame", tmp_path / "frame0.png"]
    options = [*save_rows(tmp_path, "long", actions, camera, slice(0, total)), *given]
    assert generate(tmp_path, "long", [*options, "--clips", "3", "--seeds", SEED], family, tiny_pipelines) == 0
    line = json.loads((tmp_path / "long" / "samples.jsonl").read_text())
    assert (line["seed"], "failure" in line) == (SEED, False)
    assert ">clips<" in (tmp_path / "long" / "index.html").read_text()
    (long,) = videos
    assert long.shape == (total, height, width, 3)
    for clip in range(NUM_CLIPS):
        start = clip * (frames - 1)
        options = save_rows(tmp_path, f"clip{clip}", actions, camera, slice(start, start + frames))
        options += ["--first-frame", str(tmp_path / f"frame{clip}.png"), "--seeds", str(clip_seed(SEED, clip))]
        assert generate(tmp_path, f"clip{clip}", options, family, tiny_pipelines) == 0
        Image.fromarray(videos[-1][-1]).save(tmp_path / f"frame{clip + 1}.png")
        kept = slice(1 if clip else 0, None)
        np.testing.assert_array_equal(videos[-1][kept], long[start : start + frames][kept])
    if family == "cosmos3":  # slices that do not overlap by the conditioning frame give another video
        shifted = np.insert(actions, frames - 1, 9.0, axis=0)[:-1]
        options = [*save_rows(tmp_path, "shifted", shifted, camera, slice(0, total)), *given]
        assert generate(tmp_path, "shifted", [*options, "--clips", "3", "--seeds", SEED], family, tiny_pipelines) == 0
        np.testing.assert_array_equal(videos[-1][:frames], long[:frames])
        assert (videos[-1][frames:] != long[frames:]).any()


def test_clips_that_cannot_be_generated_are_refused(tiny_pipelines, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a cat\n")
    np.save(tmp_path / "short.npy", np.zeros((8, 9)))
    for family, options, message in (
        ("wan21", [], "--clips: {model}: wan cannot continue a clip, it does not support 1 conditioning frames"),
        (
            "cosmos3",
            ["--actions", tmp_path / "short.npy"],
            "--actions: actions has 8 rows, but 2 clips of 9 frames that overlap by 1 need 16",
        ),
        ("cosmos3", ["--frames", "1"], "--clips: clips of 1 frames are too short to be continued"),
    ):
        assert generate(tmp_path, "none", [*options, "--clips", "2"], family, tiny_pipelines) == 2
        assert message.format(model=tiny_pipelines(family)) in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_text_can_start_a_long_video(tiny_pipelines, tmp_path, videos):
    """Without a first frame, the first clip equals that of one clip."""
    (tmp_path / "a.txt").write_text("a cat\n")
    assert generate(tmp_path, "one", [], "cosmos25", tiny_pipelines) == 0
    assert generate(tmp_path, "two", ["--clips", "2"], "cosmos25", tiny_pipelines) == 0
    np.testing.assert_array_equal(videos[1][:9], videos[0])
    assert videos[1].shape[0] == 17
