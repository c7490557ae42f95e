"""Runs on LeRobot datasets: both versions train like captioned videos, and an interrupted run continues alike."""

import json
from pathlib import Path

import numpy as np
import pytest

from lerobot import ACTION, FRONT, WRIST, record, write_lerobot
from multi_rank.resuming import STEPS, assert_equal_runs, records, tiny_recipe, train_with_own_code

pytest.importorskip("pyarrow")
TESTS = str(Path(__file__).parent.parent)
COMMON = [
    "model.family=steered:Steered",
    "data.inputs=[actions, domain]",
    "algorithm.min_num_conditional_frames=1",
    "algorithm.max_num_conditional_frames=1",
    "sampling={height: 32, width: 32, num_frames: 5, eval_steps: 2}",
    "engine.gradient_accumulation=2",
    "optimizer.lr=3e-2",
    f"run.steps={STEPS}",
    "logging.console=false",
]
LEROBOT = ["data.kind=lerobot", f"data.views=[[{FRONT}]]", "data.domain=3"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The same episodes in three folders: `paired`, `v2.1` and `v3.0`. Each has a single window of 5 frames."""
    root = tmp_path_factory.mktemp("sets")
    episodes = record(root / "recorded", [9, 8, 7, 9, 6, 9], cameras=(FRONT, WRIST), crf="10")
    (root / "paired").mkdir()
    for e, episode in enumerate(episodes):
        name = f"episode_{e:06}#0"
        (root / f"paired/{name}.mp4").write_bytes(episode.videos[FRONT])
        np.save(root / f"paired/{e}.npy", episode.action[:-1])
        caption = {"prompt": episode.tasks[0], "actions": f"{e}.npy", "domain": 3}
        (root / f"paired/{name}.json").write_text(json.dumps(caption))
    for version in ("v2.1", "v3.0"):
        write_lerobot(root / version, version, episodes)
    assert episodes[0].action.shape == (9, 2), ACTION
    return root


def settings(folder, tiny_pipelines, data, *overrides):
    kind = [] if data.name == "paired" else LEROBOT
    overrides = [*COMMON, *kind, *overrides]
    return {**tiny_recipe("cosmos25_sft", folder, tiny_pipelines("cosmos25"), *overrides, data=data), "folder": TESTS}


def test_both_versions_train_like_captioned_videos(one_rank, tiny_pipelines, sets, tmp_path):
    keys = ["validation.holdout=0", "run.steps=2"]
    for name in ("paired", "v2.1", "v3.0"):
        one_rank.run(train_with_own_code, **settings(tmp_path / name, tiny_pipelines, sets / name, *keys))
    assert sum(line.get("optim/grad_norm", 0) > 0 for line in records(tmp_path / "paired")) == 2
    for version in ("v2.1", "v3.0"):
        assert_equal_runs(tmp_path / version, tmp_path / "paired", step=2)


def test_an_interrupted_run_continues_alike(two_ranks, tiny_pipelines, sets, tmp_path):
    keys = [f"data.views=[[{WRIST}],[{FRONT},{WRIST}]]", "sampling.height=48", "validation.episodes='-2:'"]
    whole, parts = (settings(tmp_path / name, tiny_pipelines, sets / "v3.0", *keys) for name in ("whole", "parts"))
    two_ranks.run(train_with_own_code, **whole)
    stopped = two_ranks.run(train_with_own_code, **parts, stop_at=2)
    assert {one["step"] for one in stopped} == {2}
    two_ranks.run(train_with_own_code, **parts)
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
