"""`wfm data stats` of LeRobot datasets, folders and recipes, and training with its file."""

import json

import numpy as np
import pytest
import yaml

from folders import sft_recipe
from lerobot import FPS, FRONT, WRIST, record, write_lerobot
from wfm_ds.cli import data_stats
from wfm_ds.cli.main import main
from wfm_ds.data.action_data import load_action_data
from wfm_ds.data.datasets import load_data

pytest.importorskip("pyarrow")
LENGTHS = (12, 9, 15, 11)
OWN_SPACE = {"poses": [{"feature": "observation.state", "at": "0:6", "rotation": "euler_xyz"}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stats")
    episodes = record(folder / "recorded", LENGTHS, cameras=(FRONT, WRIST))
    for version in ("v2.1", "v3.0"):
        write_lerobot(folder / version, version, episodes)
    return folder


@pytest.fixture
def stats(capsys, tmp_path, monkeypatch):
    """`stats(*arguments)`: run the command in an empty folder. Return (exit code, output, files by name)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["data", "stats", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out + err, {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}

    return run


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_statistics_of_a_lerobot_dataset(root, stats):
    before = files_below(root)
    rows = np.concatenate([np.stack([np.arange(n - 1), np.full(n - 1, e)], 1) for e, n in enumerate(LENGTHS)])
    for version in ("v2.1", "v3.0"):
        code, out, files = stats(root / version)
        assert (code, list(files)) == (0, [str(data_stats.DEFAULT_FILE)])
        assert f"{len(rows)} actions of 4 episodes" in out
        found = files["action_stats.json"]
        np.testing.assert_allclose(found["q99"], np.quantile(rows, 0.99, axis=0), rtol=1e-6)
        np.testing.assert_allclose([found["mean"], found["std"]], [rows.mean(0), rows.std(0)], rtol=1e-6)
    assert files_below(root) == before
    code, out, _ = stats(root / "v3.0", "--space", "droid")
    assert code == 2
    assert "action has 2 numbers per frame, the space reads 7" in out
    code, out, _ = stats(root / "v3.0", "--fps", FPS / 2, "--out", "nowhere/stats.json")
    assert code == 2
    assert "2 apart" in out  # stored actions of several frames need data.actions.compose


def write_recipe(root, folder, **data):
    keys = {"kind": "lerobot", "path": str(root / "v3.0"), "views": [[FRONT]], "inputs": ["actions"], "fps": FPS / 3}
    keys["actions"] = {"space": OWN_SPACE, "normalize": "quantile", "stats": "data"}
    recipe = sft_recipe(
        {**keys, "max_upscale": 4.0, "cache_dir": str(folder / "cache"), **data}, num_frames=3, episodes="-1:"
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    return recipe


def test_statistics_of_a_recipe_are_those_of_its_training_data(root, stats, tmp_path):
    """A run with the written file, and runs with and without cached statistics, scale actions alike."""
    recipe = write_recipe(root, tmp_path)
    code, out, files = stats("recipe.yaml")
    assert code == 0, out
    assert f"{sum(n - 3 for n in LENGTHS[:-1])} actions of 3 episodes" in out
    scalings = [load_data(recipe).actions.scaling]
    (cached,) = (tmp_path / "cache/action_stats").iterdir()
    assert json.loads(cached.read_text()) == files["action_stats.json"]
    changed = {name: [2 * number for number in numbers] for name, numbers in files["action_stats.json"].items()}
    cached.write_text(json.dumps(changed))
    assert (load_data(recipe).actions.scaling.scale == 2 * scalings[0].scale).all()  # the cache is read
    for space, fps in ((OWN_SPACE, FPS / 2), ({"feature": "observation.state"}, None)):
        other = {"space": space, "normalize": "quantile", "stats": "data"}
        load_data(write_recipe(root, tmp_path, fps=fps, actions=other))
    assert len(list((tmp_path / "cache/action_stats").iterdir())) == 3  # other settings have other entries
    by_file = {"space": OWN_SPACE, "normalize": "quantile", "stats": str(tmp_path / "action_stats.json")}
    scalings.append(load_action_data(write_recipe(root, tmp_path, actions=by_file), [], []).scaling)
    assert (scalings[0].low == scalings[1].low).all()
    assert (scalings[0].scale == scalings[1].scale).all()


def test_each_data_set_of_a_mixture_has_a_file(root, stats, tmp_path):
    parts = [
        {"kind": "lerobot", "path": v, "views": [[FRONT]], "episodes": e} for v, e in (("v2.1", ":2"), ("v3.0", "1:"))
    ]
    data = {"kind": "sets", "path": str(root), "sets": parts, "inputs": ["actions"], "max_upscale": 4.0}
    (tmp_path / "mix.yaml").write_text(
        yaml.safe_dump(sft_recipe(data, 3, holdout=0.0).model_dump(mode="json", exclude_unset=True))
    )
    code, out, files = stats("mix.yaml")
    assert code == 0, out
    assert {name: numbers["max"][1] for name, numbers in files.items()} == {
        "action_stats.v2.1.json": 1,
        "action_stats.v3.0.json": 3,
    }


def test_what_cannot_be_computed_is_said(root, stats, tmp_path):
    write_recipe(root, tmp_path)
    for arguments, says in (
        (("recipe.yaml", "--space", "droid"), "a recipe has its own space and fps"),
        ((root / "v3.0", "data.fps=3"), "only a recipe has keys to override"),
        (("nowhere",), "nowhere"),
        ((root / "recorded",), "recorded"),
        ((root / "recorded", "--space", "droid"), "only LeRobot data sets have the features of a space"),
    ):
        code, out, files = stats(*arguments)
        assert (code, files) == (2, {}), arguments
        assert says in out
