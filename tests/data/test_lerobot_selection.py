"""LeRobot datasets: colours, damaged episodes, files to download, mixtures and validation data."""

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pydantic import ValidationError

from folders import sft_recipe
from lerobot import ACTION, FRONT, STATE, WRIST, change_episodes, change_info, delay, record, write_lerobot
from wfm_ds.cli.main import main
from wfm_ds.data import episode_rows, lerobot
from wfm_ds.data.action_data import load_action_data
from wfm_ds.data.action_statistics import load_statistics
from wfm_ds.data.datasets import choose_held_out_source, lerobot_sources, load_data
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.errors import DataError, UserError
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.training.early_checks import require_data

pa = pytest.importorskip("pyarrow")
LENGTHS = (16, 9, 13, 17, 12)
RED = (200, 30, 40)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder with the same dataset in both versions."""
    root = tmp_path_factory.mktemp("sets")
    episodes = record(root / "recorded", LENGTHS, cameras=(FRONT, WRIST), size=(32, 48))
    shutil.rmtree(root / "recorded")
    for version in ("v2.1", "v3.0"):
        write_lerobot(root / version, version, episodes)
    return root


@pytest.fixture
def copy(sets, tmp_path):
    """A copy of the dataset of version 3.0 that a test may damage."""
    return shutil.copytree(sets / "v3.0", tmp_path / "v3.0")


def scan(path, **keys):
    return lerobot.LeRobotSet(DataRecipe(kind="lerobot", path=str(path), **{"views": [[FRONT]]} | keys), str(path))


def load_clip(sample, num_frames=4, size=(32, 48)):
    framing = Framing(height=size[0], width=size[1], num_frames=num_frames, max_upscale=100)
    return load_media(sample.media, framing, draw_centre)


def run_recipe(data, **validation):
    return sft_recipe({"max_bad_fraction": 0.5, "max_upscale": 4.0, **data}, 4, **validation)


def mixture(root, *parts, **keys):
    return {
        "kind": "sets",
        "path": str(root),
        "sets": [{"kind": "lerobot", "views": [[FRONT]]} | p for p in parts],
    } | keys


def test_videos_without_a_colour_tag_are_bt601_in_all_sizes(tmp_path):
    for size in ((64, 64), (720, 64)):
        pictures = np.tile(np.uint8(RED), (4, *size, 1))
        root = tmp_path / str(size[0])
        write_lerobot(root / "set", "v3.0", record(root / "one", [4], size=size, pictures=pictures))
        (sample,) = scan(root / "set").samples
        assert abs(load_clip(sample, size=size).mean((0, 1, 2)) - RED).max() < 3, size


def test_an_episode_with_a_short_video_is_rejected(copy):
    change_episodes(copy, delay(1, -3, "to"))
    found = scan(copy, max_bad_fraction=0.2)
    assert found.bad == {"short_video": [f"{copy}/episode_000001, 3 frames too short"]}
    assert [sample.id[-1] for sample in found.samples] == ["0", "2", "3", "4"]
    with pytest.raises(DataError, match=r"1 of 5 .*episode_000001, 3 frames too short \(video shorter than the rows"):
        scan(copy, max_bad_fraction=0.1)


def test_metadata_with_duplicate_or_no_episodes_is_refused(copy):
    def replace_by_second(rows):
        rows[3] = rows[2]

    change_episodes(copy, replace_by_second)
    with pytest.raises(DataError, match=r"has two episodes 2: remove one from meta/episodes"):
        scan(copy)
    shutil.rmtree(copy / "meta/episodes")
    change_info(copy, total_episodes=0)
    assert main(["data", str(copy)]) == 2
    with pytest.raises(DataError, match="has no episodes: choose another dataset"):
        scan(copy)


def test_commands_need_pyarrow(copy, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in ([], ["stats"]):
        assert main(["data", *words, str(copy)]) == 2
        assert 'needs pyarrow: pip install "wfm_ds[lerobot]"' in capsys.readouterr().err


def test_the_first_task_with_a_text_is_the_prompt(copy):
    change_episodes(copy, lambda rows: rows[0].update(tasks=["", "lift"]))
    assert scan(copy).samples[0].prompt.text == "lift"


def test_decode_errors_name_the_episode_and_the_file(copy):
    file = copy / f"videos/{FRONT}/chunk-000/file-000.mp4"
    sample = scan(copy).samples[1]
    file.write_bytes(b"none")
    with pytest.raises(BadMedia, match=rf"^{copy}/episode_000001: {file}: cannot be decoded, .* \(decode\)$"):
        load_clip(sample)
    with pytest.raises(BadMedia, match=rf"^{scan(copy).samples[2].media.name}: .* pixels need 25.*too_small\)$"):
        load_clip(scan(copy).samples[2], size=(32 * 250, 48))


def test_threads_do_not_replace_the_columns_of_each_other(sets, monkeypatch):
    episodes = [sample.rows for sample in scan(sets / "v2.1").samples]
    columns = [(rows, name) for rows in episodes[:4] for name in (STATE, ACTION, "timestamp", "index")]
    assert len(columns) == 2 * episode_rows.NUM_CACHED_COLUMNS
    num_opened, open_stream = [], episode_rows.open_stream
    monkeypatch.setattr(episode_rows, "open_stream", lambda file: num_opened.append(file) or open_stream(file))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for _ in range(2):
            num_opened.clear()
            for thread, part in ((one, columns[::2]), (other, columns[1::2])):
                for rows, name in part:
                    thread.submit(rows.__getitem__, name).result()
    assert num_opened == []


def test_rows_of_different_lengths_are_unreadable(tmp_path):
    import pyarrow.parquet as pq

    table = pa.table({ACTION: [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]], "episode_index": [0, 0, 0]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: action has rows of different lengths"):
        EpisodeRows(str(tmp_path / "a.parquet"), 0, 3, 0)[ACTION]


def test_the_width_is_that_of_episodes_from_the_whole_dataset(copy):
    (copy / "data/chunk-000/file-000.parquet").unlink()  # episodes 0 and 1
    many = {"kind": "lerobot", "path": str(copy), "views": [[FRONT]], "inputs": ["actions"]}
    recipe = run_recipe(many, holdout=0.0)
    samples = scan(copy).samples
    windows = [dataclasses.replace(sample, id=f"{sample.id}#{k}") for sample in samples for k in range(20)]
    assert load_action_data(recipe, windows, []).width == 2
    normalized = ActionsRecipe(normalize="quantile", stats="data")
    cached = [load_statistics(windows, normalized, None, copy.parent / "cache") for _ in range(2)]
    assert cached[0] == cached[1] == load_statistics(samples[2:], normalized, None, None)
    assert len(list((copy.parent / "cache/action_stats").iterdir())) == 1


def test_validation_data_of_a_mixture_has_its_own_width(sets):
    parts = [{"path": "v2.1", "name": "a", "actions": {"space": {"feature": ACTION}}}]
    keys = mixture(sets, *parts, inputs=["actions"], actions={"space": {"feature": STATE}})
    recipe = run_recipe(keys, path=str(sets / "v3.0"))
    require_data(recipe)  # before the ranks start
    loaded = load_data(recipe)
    assert [one.id for one in loaded.held_out] == [f"episode_{e:06}" for e in range(5)]
    assert (loaded.actions.width, loaded.actions.sets["a"].width) == (6, 2)


def test_an_episode_in_two_data_sets_is_on_one_side_of_the_hold_out(sets):
    parts = [{"path": ".", "name": "all"}, {"path": "v3.0", "name": "b", "views": [[WRIST]]}]
    loaded = load_data(run_recipe(mixture(sets, *parts), holdout=0.4))
    sides = loaded.samples, loaded.held_out
    trained, held_out = ({one.media.name.partition("#")[0] for one in side} for side in sides)
    assert not trained & held_out
    assert held_out
    assert len(trained) + len(held_out) == 10
    ids = {one.id.partition("#")[0] for side in sides for one in side}
    assert len(ids) == 15  # the episodes of v3.0 are in both sets


def test_revisions_belong_to_a_data_set(tmp_path):
    recipe = run_recipe(mixture(tmp_path, {"path": "owner/name", "options": {"revision": "abc"}}))
    assert [data.options for data, _ in lerobot_sources(recipe)] == [{"revision": "abc"}]
    alone = {"kind": "lerobot", "path": "owner/name", "options": {"revision": "abc"}, "episodes": ":5"}
    data, paths = choose_held_out_source(run_recipe(alone, path="owner/other"))
    assert (paths, data.options, data.episodes) == (["owner/other"], {}, None)
    data, paths = choose_held_out_source(run_recipe(alone, episodes="-5:"))
    assert (paths, data.options, data.episodes) == (["owner/name"], {"revision": "abc"}, "-5:")
    with pytest.raises(ValidationError, match="options is only for kind hf, lerobot"):
        run_recipe(mixture(tmp_path, {"path": "a", "kind": "folder", "options": {"revision": "abc"}}))


def test_many_files_are_requested_by_folder(sets, monkeypatch):
    requested = []
    data = DataRecipe(kind="lerobot", path=str(sets / "v2.1"), views=[[FRONT]], episodes=":2")
    parts = lerobot.read_parts(data, data.path)
    for limit in (4, 3):
        monkeypatch.setattr(lerobot, "MAX_PATTERNS", limit)
        requested.append(lerobot.file_patterns(lerobot.list_files(data.path, parts)))
    names = [f"{part}/episode_00000{e}" for part in ("data/chunk-000", f"videos/chunk-000/{FRONT}") for e in (0, 1)]
    assert [name.rpartition(".")[0] for name in requested[0]] == names
    assert requested[1] == ["data/chunk-000/*", f"videos/chunk-000/{FRONT}/*"]


def test_videos_of_validation_data_are_checked(sets, copy):
    change_episodes(copy, delay(4, 3, "to"))
    alone = {"kind": "lerobot", "path": str(copy), "views": [[FRONT]], "episodes": ":2"}
    lerobot.check_video_files(lerobot_sources(run_recipe(alone, holdout=0.0)))
    for recipe in (
        run_recipe(alone, episodes="-1:"),
        run_recipe(alone | {"path": str(sets / "v3.0")}, path=str(copy)),
        run_recipe(mixture(sets, {"path": "v3.0"}), path=str(copy)),
    ):
        with pytest.raises(UserError, match="its last episode ends at"):
            lerobot.check_video_files(lerobot_sources(recipe))


def test_spaces_and_domains_of_recipes(tmp_path):
    keys = mixture(tmp_path, {"path": "a"}, {"path": "b", "kind": "paired", "views": None}, inputs=["actions"])
    parts = DataRecipe(**keys, actions={"space": "droid", "width": 10}).set_recipes()
    assert [(part.actions.space, part.actions.width) for part, _ in parts.values()] == [("droid", 10), (None, 10)]
