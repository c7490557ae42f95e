"""LeRobot datasets: both versions give the clips, states and actions of captioned videos, and bad ones are rejected."""

import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import hub_server
import s3
from each_case import check_each
from folders import contents, sft_recipe
from lerobot import (
    ACTION,
    FPS,
    FRONT,
    STATE,
    WRIST,
    change_episodes,
    change_info,
    delay,
    frame_index,
    record,
    write_lerobot,
)
from wfm_ds.cli.main import main
from wfm_ds.data.action_space import ActionSpace
from wfm_ds.data.datasets import load_data
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.lerobot import check_video_files, split_windows
from wfm_ds.data.media import clip_frames, load_media, media_size
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.demos.tiny_data import load_tiny_recipe
from wfm_ds.errors import UserError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.file import load_recipe
from wfm_ds.storage import filesystem as storage

pytest.importorskip("pyarrow")
LENGTHS = (16, 9, 13, 17, 12)
VERSIONS = ("v2.1", "v3.0")
TASKS = [["push | shove the block"], ["lift"], [], ["push | shove the block", "lift"], ["  lift "]]
SIZE = (32, 48)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded"), LENGTHS, cameras=(FRONT, WRIST), size=SIZE, tasks=TASKS)


@pytest.fixture(scope="module")
def sets(tmp_path_factory, episodes):
    """A folder with the same dataset in both versions, and with one row group for all episodes of a file."""
    root = tmp_path_factory.mktemp("sets")
    for version in VERSIONS:
        write_lerobot(root / version, version, episodes)
    write_lerobot(root / "old" / "v3.0", "v3.0", episodes, per_file=3, row_groups=False)
    return root


@pytest.fixture
def copy(sets, tmp_path):
    """`copy(version)`: return a copy of a dataset that a test may damage."""
    return lambda version="v3.0": shutil.copytree(sets / version, Path(tempfile.mkdtemp(dir=tmp_path)) / version)


def recipe(path, **keys):
    return DataRecipe(**{"kind": "lerobot", "path": str(path), "views": [[FRONT]], "prompt": "work"} | keys)


def scan(path, **keys):
    return build_sample_set(recipe(path, **keys), [str(path)])


def framing(**keys):
    return Framing(**{"height": SIZE[0], "width": SIZE[1], "num_frames": 5} | keys)


def drawn(u):
    return lambda purpose: u


def test_a_sample_is_an_episode_with_its_frames_and_rows(sets, episodes):
    for path, keys in itertools.product(("v2.1", "v3.0", "old/v3.0"), ({}, {"fps": FPS / 2}, {"fps": 7.0})):
        found = scan(sets / path)
        assert [sample.id for sample in found.samples] == [f"episode_{e:06}" for e in range(5)]
        for sample, episode in zip(found.samples, episodes, strict=True):
            assert {name: rows.shape for name, rows in sample.rows.items() if name in (STATE, ACTION)} == {
                STATE: (episode.length, 6),
                ACTION: (episode.length, 2),
            }
            assert (sample.rows[ACTION] == episode.action).all()
            assert (sample.rows[STATE] == episode.state).all()
            if episode.length < 13:
                continue
            chosen, total = clip_frames(sample.media, framing(**keys), drawn(0.7))
            frames = load_media(sample.media, framing(**keys), drawn(0.7))
            assert total == episode.length
            assert [frame_index(frame) for frame in frames] == chosen
            assert abs(frames[:, :, 30:].mean() - 20 * sample.rows.episode - 10) < 3


def write_paired(folder, episodes):
    """Write each episode as a video with a caption and actions. The names are the ids of its only window."""
    folder.mkdir()
    for e, episode in enumerate(episodes):
        (folder / f"episode_{e:06}#0.mp4").write_bytes(episode.videos[FRONT])
        np.save(folder / f"{e}.npy", episode.action[:-1])
        caption = {"prompt": episode.tasks[0].strip() if episode.tasks else "work", "actions": f"{e}.npy"}
        (folder / f"episode_{e:06}#0.json").write_text(json.dumps(caption))
    return folder


def video_recipe(data, num_frames=9, **validation):
    return sft_recipe({"max_bad_fraction": 0.5, "max_upscale": 4.0, **data}, num_frames, **validation)


def read_steps(num_steps=2, **data):
    """Return the samples of the first steps as a training run reads them: id, caption, actions and pixels."""
    settings = video_recipe({"inputs": ["actions"]} | data, holdout=0.0)
    loaded = load_data(settings)
    reader = InputReader(
        input_ndims={"actions": 2},
        num_frames=9,
        actions=settings.data.actions,
        width=loaded.actions.width,
        space=ActionSpace.from_recipe(settings.data.actions),
        validate=lambda inputs: None,
    )
    source = BatchSource(
        loaded.samples,
        global_batch=6,
        seed=3,
        shuffle=True,
        framings=[framing(num_frames=9)],
        buckets=[0] * len(loaded.samples),
        unit=1,
        max_bad_fraction=0.5,
        inputs=reader,
    )
    try:
        batches = [source.read_batch(step, 0, 1) for step in range(1, num_steps + 1)]
    finally:
        source.close()
    return [one for batch in batches for one in batch]


def test_both_versions_train_like_captioned_videos(sets, tmp_path, episodes):
    lerobot = {"kind": "lerobot", "views": [[FRONT]], "prompt": "work"}
    paired = read_steps(kind="paired", path=str(write_paired(tmp_path / "paired", episodes)))
    assert len({one.sample_id for one in paired}) == 5
    for path in ("v2.1", "v3.0", "old/v3.0"):
        for one, other in zip(paired, read_steps(path=str(sets / path), **lerobot), strict=True):
            assert (one.sample_id, one.epoch, one.position) == (other.sample_id, other.epoch, other.position)
            assert (one.pixels == other.pixels).all()
            assert (one.prompt.inputs["actions"] == other.prompt.inputs["actions"]).all()
            if " | " in one.prompt.text:  # one of them is drawn
                assert other.prompt.text in one.prompt.text.split(" | ")
            else:
                assert one.prompt.text == other.prompt.text


def test_one_of_several_descriptions_is_drawn_in_each_epoch(sets):
    """The draw depends on seed, epoch and id; all descriptions are in the list of texts to encode."""
    data = {"kind": "lerobot", "path": str(sets / "v3.0"), "views": [[FRONT]], "prompt": "work"}
    drawn_texts = [(one.sample_id, one.epoch, one.prompt.text) for one in read_steps(num_steps=8, **data)]
    assert drawn_texts == [(one.sample_id, one.epoch, one.prompt.text) for one in read_steps(num_steps=8, **data)]
    texts = {text for name, _, text in drawn_texts if name == "episode_000000#0"}
    assert texts == {"push", "shove the block"}
    (first, lift, none, several, _) = scan(sets / "v3.0").samples
    assert first.texts == ("push", "shove the block")
    assert [one.prompt.text for one in (lift, none, several)] == ["lift", "work", "push"]
    assert (lift.texts, none.texts) == ((), ())
    found = scan(sets / "v3.0", prompt=None, max_bad_fraction=0.2)
    assert found.bad == {"no_prompt": [f"{sets / 'v3.0'}/episode_000002"]}
    assert found.notes == ["1 episodes have several tasks: the first one is their prompt"]


def test_views_are_pasted_pixels(sets):
    (sample, *_) = scan(sets / "v3.0", views=[[FRONT], [WRIST, FRONT]]).samples
    single = [scan(sets / "v2.1", views=[[name]]).samples[0] for name in (FRONT, WRIST)]
    front, wrist = (load_media(one.media, framing(), draw_centre) for one in single)
    height, width = SIZE
    assert media_size(sample.media) == (3 * height // 2, width)
    shown = load_media(sample.media, framing(height=3 * height // 2), draw_centre)
    for picture, above, below in zip(shown, front, wrist, strict=True):
        small = [np.asarray(Image.fromarray(one).resize((width // 2, height // 2), 3)) for one in (below, above)]
        assert (picture == np.concatenate([above, np.concatenate(small, axis=1)])).all()
    pair = scan(sets / "v2.1", views=[[WRIST, FRONT]]).samples[0]
    both = load_media(pair.media, framing(width=2 * width), draw_centre)
    assert (both == np.concatenate([wrist, front], axis=2)).all()
    assert len({pair.media.identity(), sample.media.identity(), *(one.media.identity() for one in single)}) == 4


def test_windows_cover_an_episode_and_are_on_one_side_of_the_hold_out(sets):
    lerobot = {"kind": "lerobot", "path": str(sets / "v3.0"), "views": [[FRONT]], "prompt": "work"}
    for validation in ({"holdout": 0.3}, {"episodes": "-2:"}):
        loaded = load_data(video_recipe(lerobot, 4, **validation))
        trained, held_out = ({one.id.partition("#")[0] for one in side} for side in (loaded.samples, loaded.held_out))
        assert trained | held_out == {f"episode_{e:06}" for e in range(5)}
        assert not trained & held_out
        for name in trained:
            windows = [one for one in loaded.samples if one.id.startswith(f"{name}#")]
            length = LENGTHS[int(name[-6:])]
            assert [one.id for one in windows] == [f"{name}#{k}" for k in range(length // 4)]
            ends = [one.media.first + one.media.length for one in windows]
            assert [0, *ends[:-1]] == [one.media.first for one in windows]
            assert ends[-1] == length
            assert min(one.media.length for one in windows) >= 4
            frames = load_media(windows[-1].media, framing(num_frames=4), drawn(0.999))
            assert [frame_index(frame) for frame in frames] == list(range(length - 4, length))
        if validation == {"episodes": "-2:"}:
            assert held_out == {"episode_000003", "episode_000004"}
    assert len(split_windows(scan(sets / "v2.1").samples, 4, FPS / 2)) == sum(n // 7 for n in LENGTHS)


def test_episodes_and_parts_and_mixtures(sets, tmp_path):
    assert [one.id[-1] for one in scan(sets / "v2.1", episodes="1:-2").samples] == ["1", "2"]
    below = scan(sets, episodes=":1")
    assert [one.id for one in below.samples] == [f"{part}/episode_000000" for part in ("old/v3.0", "v2.1", "v3.0")]
    parts = [
        {"kind": "lerobot", "path": "v2.1", "views": [[FRONT]], "prompt": "a", "weight": 1},
        {"kind": "lerobot", "path": "v3.0", "views": [[WRIST], [FRONT]], "episodes": "1:3", "prompt": "b", "weight": 3},
    ]
    mixed = load_data(video_recipe({"kind": "sets", "path": str(sets), "sets": parts}, holdout=0.0))
    heights = {one.id.partition("/")[0]: media_size(one.media)[0] for one in mixed.samples}
    assert heights == {"v2.1": SIZE[0], "v3.0": 2 * SIZE[0]}
    names = [one.id.partition("/")[0] for one in mixed.samples]
    assert names.count("v3.0") == 3 * names.count("v2.1") == 15


@pytest.fixture
def bucket(monkeypatch):
    """An S3 server. Yields the boto3 client."""
    for name in s3.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with s3.s3_server() as (url, client):
        s3.use(url)
        yield client
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for name in s3.VARIABLES:
        os.environ.pop(name, None)


def test_s3_gives_the_same_and_a_clip_reads_little(tmp_path, bucket, monkeypatch):
    pictures = np.random.default_rng(0).integers(0, 255, (8, 64, 64, 3), np.uint8)
    noise = record(
        tmp_path / "recorded",
        [300, 300],
        pictures=np.tile(pictures, (38, 1, 1, 1))[:300],
        size=(64, 64),
        crf="1",
        g="8",
    )
    root = write_lerobot(tmp_path / "noise", "v3.0", noise)
    for file in (path for path in root.rglob("*") if path.is_file()):
        bucket.upload_file(str(file), s3.BUCKET, f"sets/{file.relative_to(root)}")
    total = sum(file.stat().st_size for file in root.rglob("*.mp4"))
    assert total > 3 << 20
    num_bytes, read_range = [], storage.read_range
    monkeypatch.setattr(storage, "read_range", lambda *args: num_bytes.append(args[2]) or read_range(*args))
    remote, local = (scan(path, prompt=None).samples for path in (f"s3://{s3.BUCKET}/sets", root))
    assert [one.prompt for one in remote] == [one.prompt for one in local]
    for one, other in zip(remote, local, strict=True):
        num_bytes.clear()
        frames = load_media(one.media, framing(height=64, width=64), drawn(0.7))
        actions = one.rows[ACTION]
        assert sum(num_bytes) < 1 << 20
        assert (frames == load_media(other.media, framing(height=64, width=64), drawn(0.7))).all()
        assert (actions == other.rows[ACTION]).all()


def test_the_hub_sends_the_metadata_the_rows_and_the_named_cameras(sets, tmp_path, monkeypatch, capsys):
    with hub_server.hub_server() as hub:
        hub_server.use(monkeypatch, url=hub.url, cache=tmp_path)
        for version in VERSIONS:
            repo = hub.repos[f"owner/{version}"] = hub_server.Repo(hub_server.files_of(sets / version))
            found = scan(f"owner/{version}", episodes=":2", options={"revision": repo.commit})
            assert [one.id for one in found.samples] == ["episode_000000", "episode_000001"]
            sent = set(hub.sent)
            assert {name for name in repo.files if name.startswith("meta/")} <= sent
            wanted = {1: "file-000.mp4"} if version == "v3.0" else {1: "episode_000000.mp4", 2: "episode_000001.mp4"}
            assert sorted(name.rpartition("/")[2] for name in sent if name.endswith(".mp4")) == sorted(wanted.values())
            assert not any(WRIST in name for name in sent)
            (local, *_) = scan(sets / version).samples
            frames = load_media(found.samples[0].media, framing(), draw_centre)
            assert (frames == load_media(local.media, framing(), draw_centre)).all()
            assert (found.samples[0].rows[STATE] == local.rows[STATE]).all()
            hub.sent.clear()
        assert main(["data", "owner/v3.0"]) == 0
        assert "5 of 9 to 17 frames" in capsys.readouterr().out
        with pytest.raises(UserError, match=r"owner/none is neither a folder nor a dataset .*hf download"):
            scan("owner/none")


DEPTH = {"dtype": "video", "shape": [32, 48, 1], "names": None, "info": {"video.is_depth_map": True}}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BAD = {
    "unknown camera": (
        {"views": [["wrist"]]},
        None,
        rf"has no camera wrist: change data.views. .* are {WRIST}, {FRONT}$",
    ),
    "several cameras": ({"views": None}, None, rf"has 2 cameras: set data.views to some of them: {FRONT}, {WRIST}$"),
    "no video": ({"views": [[STATE]]}, None, rf"has {STATE}, but it is not a video: change data.views"),
    "no such feature": (
        {"inputs": ["actions"], "actions": {"space": {"feature": "actions"}}},
        None,
        r"no feature actions. It has action, observation.state$",
    ),
    "no such episodes": ({"episodes": "7:"}, None, "has 5 episodes, none of which is in 7:"),
    "old version": (
        {},
        lambda root: change_info(root, codebase_version="v1.6"),
        r"codebase_version v1.6, but only v2.0",
    ),
    "episodes missing": ({}, lambda root: change_info(root, total_episodes=6), r"has 5 of the 6 episodes"),
    "metadata missing": ({}, lambda root: shutil.rmtree(root / "meta/episodes"), r"has 0 of the 5 episodes"),
    "damaged": ({}, lambda root: (root / "meta/info.json").write_text("{}"), r"info.json is damaged \(KeyError: "),
    "pointer": (
        {},
        lambda root: (root / "meta/episodes/chunk-000/file-000.parquet").write_text(LFS),
        "is a Git LFS pointer, not the file itself: run git lfs pull",
    ),
    "no dataset": ({}, lambda root: shutil.rmtree(root / "meta"), r"is not a LeRobot dataset: it has no meta"),
    "no folder": ({}, shutil.rmtree, "not found: correct data.path"),
    "depth": (
        {"views": [["observation.depth"]]},
        lambda root: change_info(
            root, features=json.loads((root / "meta/info.json").read_text())["features"] | {"observation.depth": DEPTH}
        ),
        "has observation.depth, but depth videos cannot be read: change data.views",
    ),
    "images": (
        {},
        lambda root: change_info(root, features={FRONT: {"dtype": "image", "shape": [32, 48, 3], "names": None}}),
        "has no colour videos: convert its images to videos",
    ),
    "late start": (
        {},
        lambda root: change_episodes(root, delay(1, 3, "from")),
        "episode 1 starts at 1.188 s of the video, but the episode before it ends at 1.000 s: correct from_timestamp",
    ),
    "late end": (
        {},
        lambda root: change_episodes(root, delay(1, 3, "to")),
        r"file-000.mp4 is 1.562 s long, but its last episode ends at 1.750 s: correct",
    ),
}


def check_files(path, **keys):
    check_video_files([(recipe(path, **keys), str(path))])


@check_each("name", BAD)
def test_bad_datasets_are_refused_with_one_sentence(copy, name):
    keys, damage, says = BAD[name]
    root = copy()
    if damage is not None:
        damage(root)
    with pytest.raises(UserError, match=says) as raised:
        [check(root, **keys) for check in (scan, check_files)]
    assert "\n" not in str(raised.value)


def test_bad_files_are_counted_by_name(copy):
    root = copy()
    video = root / f"videos/{FRONT}/chunk-000/file-000.mp4"
    samples = scan(root).samples
    check_files(root)
    with pytest.raises(BadMedia, match=r"16 frames, but clips have 30 \(too_short\)"):
        load_media(samples[0].media, framing(num_frames=30), draw_centre)
    doubled = copy("v2.1")
    change_info(doubled, fps=2 * FPS)  # every second frame is missing
    with pytest.raises(BadMedia, match=r"2 of 5 frames cannot be decoded \(decode\)"):
        load_media(scan(doubled).samples[0].media, framing(), drawn(0))
    rows = EpisodeRows(samples[1].rows.file, 0, 9, 1)
    with pytest.raises(ValueError, match="rows 0 to 9 do not belong to episode 1"):
        rows[ACTION]
    with pytest.raises(ValueError, match="has 25 rows, episode 1 ends at row 34"):
        EpisodeRows(rows.file, 25, 9, 1)[ACTION]
    with pytest.raises(KeyError, match="no feature torque"):
        rows["torque"]
    content = video.read_bytes()
    video.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadMedia, match="cannot be decoded") as raised:
        load_media(samples[1].media, framing(), draw_centre)
    assert raised.value.reason == "decode"
    video.write_text(LFS)
    with pytest.raises(BadMedia, match="run git lfs pull"):
        load_media(samples[1].media, framing(), draw_centre)


def test_commands_describe_a_dataset_and_write_nothing_into_it(sets, capsys):
    before = contents(sets)
    assert main(["data", str(sets / "v3.0")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{sets / 'v3.0'}: LeRobot dataset v3.0",
        "episodes   5 of 9 to 17 frames, 67 in total",
        "fps        16",
        f"cameras    {FRONT} 48 x 32, {WRIST} 48 x 32",
        "features   observation.state [6], action [2]",
        'tasks      3: "push | shove the block", "lift", "  lift "',
    ]
    assert main(["data", str(sets)]) == 0
    assert capsys.readouterr().out.count("LeRobot dataset") == 3
    for path in (sets, sets / "v2.1"):
        assert main(["data", "captions", str(path), "--prompt", "a robot"]) == 2
    assert contents(sets) == before


def test_init_writes_a_recipe_that_check_accepts_and_damage_is_found(copy, tmp_path, monkeypatch, capsys):
    root, recipe_file = copy(), tmp_path / "mine.yaml"
    monkeypatch.chdir(tmp_path)
    before = contents(root)
    words = ["init", "--data", str(root), "--model", "tiny:cosmos3", "--prompt", "work", "-y", "--out", "mine.yaml"]
    assert main(words) == 0
    assert "data: 5 videos, 48 x 32 to 48 x 32" in capsys.readouterr().out
    written = load_recipe(recipe_file).data
    assert (written.kind, written.path, written.views) == ("lerobot", str(root), [[FRONT]])
    assert (written.inputs, written.prompt) == (["actions"], "work")
    assert main(["check", "mine.yaml"]) == 0
    assert "all checks passed" in capsys.readouterr().out
    assert contents(root) == before
    with_suggestions = re.sub("^  # ", "  ", recipe_file.read_text(), flags=re.MULTILINE)
    Path("suggested.yaml").write_text(with_suggestions.replace("inputs: [actions]", "inputs: [actions, domain]"))
    suggested = load_recipe(Path("suggested.yaml")).data
    assert (written.fps, written.domain, written.actions.space) == (None, None, None)
    assert (suggested.fps, suggested.domain, suggested.actions.space) == (16, "droid_lerobot", "droid")
    recipe_file.write_text(recipe_file.read_text().replace("validation:", "validation:\n  episodes: '-2:'"))
    assert load_tiny_recipe(recipe_file, [], world_size=1).data.kind == "paired"
    change_episodes(root, delay(1, 3, "to"))
    assert main(["check", "mine.yaml"]) == 2
    assert "its last episode ends at 1.750 s: correct from_timestamp" in capsys.readouterr().err
