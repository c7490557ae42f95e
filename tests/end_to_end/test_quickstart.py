"""The quickstart as run by `make quickstart`."""

import re
import sys

import numpy as np
import pytest
from PIL import Image

from commands import run_command_of_report, run_module
from each_case import check_each
from wfm_ds.cli.main import main
from wfm_ds.cli.quickstart import parser, prepare_folder, run_and_show, run_rl, run_sft, run_training, write_report
from wfm_ds.demos.digits import std_within_prompts
from wfm_ds.demos.shapes import PromptedVideo, ShapesDemo, count_correct_starts
from wfm_ds.errors import UserError
from wfm_reward.moving_demo import MovingClip, draw_clip, list_clips, render_frames


@pytest.mark.slow
@pytest.mark.long
def test_reinforcement_learning_improves_the_digits_on_held_out_seeds(tmp_path):
    folder = tmp_path / "quickstart"
    process = run_module("wfm_ds", "quickstart", "--output", folder, timeout_s=1500)
    report = (folder / "report.md").read_text()
    before, after = map(float, re.search(r"used by RL\) \| ([\d.]+) \| ([\d.]+) \|", report).groups())
    assert 0.4 <= before <= 0.75
    assert after >= before + 0.15
    assert Image.open(folder / "before.png").size == Image.open(folder / "after.png").size
    assert (folder / "index.html").read_text().count("<circle") == 2 * 7  # both classifiers, at RL steps 0, 6, ... 36
    assert "pipe.load_lora_weights(" in report
    assert process.stderr == ""
    assert "step 36/36" in process.stdout
    assert "no GPU" not in process.stdout
    run_command_of_report(report)
    assert (folder / "more" / "index.html").read_text().count("<img") == 80


def test_only_an_rl_recipe_of_the_demo_is_accepted_and_checked_before_anything_is_written(tmp_path, capsys):
    for name, message in (
        ("sft", "--rl sft is not an RL recipe: choose ddrl or flow_grpo or flow_grpo_fast or nft"),
        ("nftt", "unknown shipped recipe 'digits/nftt'; did you mean digits/nft"),
    ):
        assert main(["quickstart", "--rl", name, "--output", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_only_progress_and_warnings_of_a_training_are_shown(capsys):
    lines = [
        "wfm_ds 0.1.0: starting digits/sft",
        "11:07:36 INFO reading data /tmp/data",
        "11:07:45 INFO step 4/225, 0:04 left, 156 images/s",
        "11:07:46 WARNING too little memory",
        "load it with:",
    ]
    code, output = run_and_show([sys.executable, "-c", f"print({chr(10).join(lines)!r}); raise SystemExit(3)"])
    assert code == 3
    assert output == [f"{line}\n" for line in lines]
    assert capsys.readouterr().out == "  step 4/225, 0:04 left, 156 images/s\n  WARNING too little memory\n"


def test_a_failed_training_shows_its_error_and_exit_code(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_training("digits/sft", f"run.output_dir={tmp_path / 'sft'}", "run.step=1")
    assert stop.value.code == 2
    assert "run.step is not a key" in capsys.readouterr().err


def test_a_folder_of_the_user_is_never_replaced(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    assert main(["quickstart", "--output", str(tmp_path)]) == 2
    assert "was not written by a quickstart" in capsys.readouterr().err
    assert (tmp_path / "data" / "mine.txt").read_text() == "mine"


@check_each(("old", "demo"), [("digits", "digits"), ("moving", "shapes"), ("world", "actions")])
def test_world_is_an_undocumented_alias_of_demo(old, demo):
    assert parser().parse_intermixed_args(["--world", old]).demo == demo
    assert parser().parse_intermixed_args(["--demo", demo]).demo == demo


def test_the_documented_option_has_the_demos_names_only():
    assert parser().parse_intermixed_args([]).demo == "digits"
    assert "--demo" in parser().format_help()
    assert "--world" not in parser().format_help()
    with pytest.raises(UserError, match="invalid choice: 'moving'"):
        parser().parse_intermixed_args(["--demo", "moving"])
    with pytest.raises(UserError, match="invalid choice 'shapes'; choose --demo digits, shapes, actions"):
        parser().parse_intermixed_args(["--world", "shapes"])


def test_spread_is_within_prompts_and_not_between_them():
    dark, light = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    assert std_within_prompts([(dark, "a"), (dark, "a"), (light, "b"), (light, "b")]) == 0
    assert std_within_prompts([(dark, "a"), (light, "a")]) == 0.5


@pytest.mark.long
def test_moving_shapes_are_trained_and_shown(tmp_path, root, monkeypatch):
    """Run a few steps of SFT and RL and check the report. benchmarks/learning/video.py measures the rewards reached."""
    monkeypatch.chdir(root)
    folder, demo = tmp_path / "quickstart", ShapesDemo()
    prepare_folder(demo, folder)
    sft_result = run_sft(demo, folder, folder / "sft", 0, "run.steps=4", "validation.seeds=[1, 2]")
    few = ("run.steps=1", "rollout.group_size=4", "algorithm.zero_std=keep", "validation.seeds=[1, 2]")
    run_rl(demo, folder, folder / "nft", sft_result, 0, *few)
    write_report(demo, folder, folder / "nft", seconds=1.0)
    report = (folder / "report.md").read_text()
    for row in (
        "reward",
        "held-out reward: both are right",
        "held-out reward: fraction of videos that match a real clip",
        "correct starts hit, of 4, mean over prompts",
    ):
        assert len(re.findall(rf"\| {row} \| \d+\.\d\d \| \d+\.\d\d \|", report)) == 2, row
    assert "| trained pairs, 18 videos |" in report
    assert "| held-out pairs, 6 videos |" in report
    assert Image.open(folder / "before.png").size == Image.open(folder / "after.png").size
    with Image.open(folder / "after.gif") as moving:
        assert moving.n_frames >= 5
    page = (folder / "index.html").read_text()
    assert re.findall(r'src="(\w+\.gif)"', page) == ["before.gif", "after.gif"]
    videos = re.findall(r'<video src="(\S+)"', page)
    assert len(videos) == 2 * 12  # a video of each prompt, before and after RL
    assert all((folder / video).exists() for video in videos)
    run_command_of_report(report, "--seeds", "1")


def test_starts_are_counted_among_the_right_videos():
    def video(asked, shown):
        return PromptedVideo(asked.prompt, render_frames(draw_clip(shown)))

    one, other, wrong = MovingClip("square", "up", 0), MovingClip("square", "up", 3), MovingClip("circle", "up", 1)
    assert count_correct_starts([video(one, one), video(one, one)]) == 1
    assert count_correct_starts([video(one, one), video(one, other), video(one, wrong)]) == 2
    assert count_correct_starts([video(one, one), video(wrong, one)]) == 0.5
    assert count_correct_starts([video(clip, clip) for clip in list_clips()]) == 4
