"""The long-video demo, as run by `make quickstart-long`."""

import re
from dataclasses import replace

import numpy as np
import pytest

from commands import run_command_of_report
from wfm_ds.cli.main import main
from wfm_ds.cli.quickstart import prepare_folder, run_rl, run_sft, write_report
from wfm_ds.demos import long_actions, long_actions_data
from wfm_ds.demos.long_actions import IMAGE_FILE, LongActionsDemo
from wfm_ds.demos.shapes import load_video


def test_a_recipe_of_another_demo_is_refused(tmp_path, capsys):
    assert main(["quickstart", "--demo", "long", "--rl", "sft", "--output", str(tmp_path / "out")]) == 2
    assert "--rl sft is not an RL recipe: choose nft or nft_history or nft_naive" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.long
def test_long_videos_are_trained_and_shown(tmp_path, root, monkeypatch):
    """Run a few steps of everything."""
    monkeypatch.chdir(root)
    small = tuple(
        replace(one, num_videos=size) for one, size in zip(long_actions_data.WALK_SETS, (160, 24, 4), strict=True)
    )
    monkeypatch.setattr(long_actions_data, "WALK_SETS", small)
    monkeypatch.setattr(long_actions, "WALK_SETS", small)
    folder, demo = tmp_path / "quickstart", LongActionsDemo()
    prepare_folder(demo, folder)
    few = ("validation.num_prompts=4", "validation.seeds=[1, 2]")
    sft_result = run_sft(demo, folder, folder / "sft", 0, "run.steps=4", *few)
    for name in demo.rl_recipes:
        run_rl(demo, folder, folder / name, sft_result, 0, "run.steps=1", "rollout.group_size=4", *few)
    write_report(demo, folder, folder / "nft_history", seconds=1.0)

    report = (folder / "report.md").read_text()
    rows = re.findall(r"\| (\S.*?) ((?:\| [\d.]+ ){6})\|", report)
    assert [title for title, _ in rows] == ["SFT", "RL on single clips", "RL on own history"]
    assert (folder / "index.html").read_text().count("<svg") == 2
    assert (folder / IMAGE_FILE).exists()
    run_command_of_report(report, "--seeds", "1")
    (video,) = (folder / "more").glob("*.mp4")
    start = load_video(folder / "data" / "held_out" / "0004.mkv")[0].astype(int)
    frames = load_video(video)
    assert len(frames) == 97
    assert np.abs(frames[0] - start).max() <= 2  # MP4 is lossy
