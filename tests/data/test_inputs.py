"""Actions, cameras and domains of clips: they are cut together with the frames, and bad ones are rejected by name."""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clips import index_of
from each_case import check_each
from folders import write_tar
from steered import write_world
from wfm_ds.data.action_data import load_trajectory_library
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_media
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import BadMedia, Framing, crop_box, crop_to_cover, draw_centre
from wfm_ds.data.trajectories import (
    ActionScaling,
    compose_actions,
    crop_intrinsics,
    load_scaling,
    pose_product,
    require_rigid,
    rotation_matrix,
)
from wfm_ds.data.webdataset import TarShards
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import ActionsRecipe
from wfm_ds.seeds import draw_uniform

FRAMES = 40


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"), count=3, frames=FRAMES, size=(32, 48))


@pytest.fixture
def samples(world):
    return CaptionedFolder(world, max_bad_fraction=0).samples


def reader(num_frames=5, ranks=None, **actions):
    settings = ActionsRecipe(**actions)
    ranks = {"actions": 2, "domain": 0} if ranks is None else ranks
    return InputReader(
        input_ndims=ranks, num_frames=num_frames, actions=settings, width=2, scaling=None, validate=lambda told: None
    )


def drawn(k):
    return lambda purpose: draw_uniform(k, purpose)


def framing(**changes):
    return Framing(**{"height": 32, "width": 48, "num_frames": 5} | changes)


@check_each("k", range(4))
def test_actions_are_those_between_the_frames_of_the_clip(samples, k):
    told = reader().load_prompt(samples[1], framing(), drawn(k))
    frames = load_media(samples[1].media, framing(), drawn(k))
    assert [index_of(frame) for frame in frames[:-1]] == told.inputs["actions"][:, 0].tolist()
    assert told.inputs["actions"][:, 1].tolist() == [1] * 4
    assert float(told.inputs["domain"]) == 1
    assert told.metadata == {"place": "clip 1"}  # the metadata goes to the rewards; it does not contain the inputs


def test_a_start_leaves_room_for_its_trajectory(samples):
    last = lambda purpose: 1 - 1e-9  # noqa: E731
    start = framing(num_frames=1, span=5)
    told = reader().load_prompt(samples[0], start, last)
    frames = load_media(samples[0].media, start, last)
    assert told.inputs["actions"][:, 0].tolist() == [35, 36, 37, 38]
    assert [index_of(frame) for frame in frames] == [35]


def test_slower_clips_need_a_composition(samples):
    half = framing(fps=12.0 * 16 / 24)  # 8 fps for a 16 fps clip
    with pytest.raises(BadMedia, match=r"2 apart.*Set data.actions.compose.*\(bad_actions\)"):
        reader().load_prompt(samples[0], half, draw_centre)
    with pytest.raises(ValueError, match="the clip repeats a frame"):
        compose_actions(np.float32([[1, 2]]), [0, 0, 1], None)
    told = reader(compose="sum").load_prompt(samples[0], half, draw_centre).inputs["actions"]
    first = index_of(load_media(samples[0].media, half, draw_centre)[0])
    assert told[:, 0].tolist() == [first + i + first + i + 1 for i in range(0, 8, 2)]


@given(st.integers(0, 2**32 - 1))
def test_composed_poses_are_products_of_matrices(seed):
    draw = np.random.default_rng(seed)
    poses = draw.normal(size=(3, 9)).astype(np.float32)

    def matrix(pose):
        whole = np.eye(4)
        whole[:3, :3], whole[:3, 3] = rotation_matrix(pose[3:6], pose[6:]), pose[:3]
        return whole

    want = matrix(poses[0].astype(float)) @ matrix(poses[1].astype(float)) @ matrix(poses[2].astype(float))
    got = pose_product(poses)
    np.testing.assert_allclose(got, np.concatenate([want[:3, 3], want[:3, 0], want[:3, 1]]), atol=1e-5)
    np.testing.assert_allclose(compose_actions(poses, [0, 3], "pose")[0], got)
    assert pose_product(poses[:0]).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0]


@given(st.integers(0, 2**32 - 1), st.sampled_from((10, 11, 18, 20)))
def test_numbers_after_the_poses_come_from_one_row(seed, width):
    draws, frames = np.random.default_rng(seed), [1, 3, 4, 4, 8]
    actions = draws.normal(size=(8, width)).astype(np.float32)
    poses = width // 9 * 9
    for rest, rows in (("first", [1, 3, 4, 4]), ("last", [2, 3, 3, 7])):
        got = compose_actions(actions, frames, "pose", rest)
        for start in range(0, poses, 9):
            alone = compose_actions(actions[:, start : start + 9], frames, "pose")
            assert (got[:, start : start + 9] == alone).all()
        assert (got[:, poses:] == actions[rows, poses:]).all()
    for frames, rest, row in (([8, 8], "first", 7), ([0, 0], "last", 0)):
        assert (compose_actions(actions, frames, "pose", rest)[0, poses:] == actions[row, poses:]).all()
    with pytest.raises(ValueError, match="needs 9 numbers per pose, got 8 per action"):
        compose_actions(actions[:, :8], [0, 2], "pose")


def test_cameras_are_cut_with_the_frames_and_their_pixels(world, samples):
    """A point of the scene has the same pixel content before and after the crop."""
    poses = np.broadcast_to(np.eye(4), (FRAMES, 4, 4)).copy()
    poses[:, 0, 3] = np.arange(FRAMES)
    np.save(world / "0.c2w.npy", poses)
    camera = {"c2w": "0.c2w.npy", "intrinsics": [40.0, 30.0, 24.0, 16.0]}
    sample = samples[0]
    sample.prompt.metadata["camera"] = camera
    square = framing(height=16, width=16, crop="random")
    told = reader(ranks={"c2w": 3, "intrinsics": 2}).load_prompt(sample, square, drawn(3))
    first = index_of(load_media(sample.media, square, drawn(3))[0])
    assert told.inputs["c2w"][:, 0, 3].tolist() == [first + i for i in range(5)]
    fx, fy, cx, cy = told.inputs["intrinsics"][0]
    across, _ = square.crop_position(drawn(3))
    assert (fx, fy, cy) == (20, 15, 8)
    assert cx == pytest.approx((24 - 16 * across) / 2, abs=1e-5)
    assert "camera" not in told.metadata
    sample.prompt.metadata["camera"] = "Canon"
    assert reader(ranks={"actions": 2}).load_prompt(sample, square, drawn(3)).metadata["camera"] == "Canon"


def test_a_pose_is_a_rotation_and_a_translation():
    good = np.broadcast_to(np.eye(4, dtype=np.float32), (3, 4, 4)).copy()
    require_rigid(good)
    for place, value in (((1, 0, 0), 0), ((1, 0, 0), -1), ((2, 0, 1), 0.1), ((0, 3, 3), 0), ((0, 3, 0), 1)):
        poses = good.copy()
        poses[place] = value
        with pytest.raises(ValueError, match="pose"):
            require_rigid(poses)


@given(st.integers(8, 60), st.integers(8, 60), st.floats(0, 1), st.floats(0, 1))
def test_the_box_is_what_pillow_cuts(height, width, across, down):
    from PIL import Image

    ramps = np.zeros((height, width, 3), np.uint8)
    ramps[..., 0], ramps[..., 1] = np.arange(width) * 4, np.arange(height)[:, None] * 4
    size = framing(height=16, width=24)
    seen = np.asarray(crop_to_cover(Image.fromarray(ramps), size, (across, down)), float)
    left, top, right, bottom = crop_box((height, width), size, (across, down))
    middle = crop_intrinsics(np.float32([[1, 1, width / 2, height / 2]]), (left, top, right, bottom), (16, 24))[0]
    assert seen[..., 0].mean() / 4 + 0.5 == pytest.approx((left + right) / 2, abs=0.6)
    assert seen[..., 1].mean() / 4 + 0.5 == pytest.approx((top + bottom) / 2, abs=0.6)
    assert middle[2] == pytest.approx((width / 2 - left) * 24 / (right - left), abs=1e-3)


BAD = {
    "another width": np.zeros((FRAMES - 1, 3)),
    "another length": np.zeros((FRAMES, 2)),
    "one axis": np.zeros(FRAMES - 1),
    "not a number": np.full((FRAMES - 1, 2), np.nan),
    "words": np.array([["up", "down"]] * (FRAMES - 1)),
}


MAGIC = b"\x93NUMPY\x01\x00"


def headed(text):
    return MAGIC + len(text).to_bytes(2, "little") + text


DAMAGED = {
    "an empty file": b"",
    "a zip": b"PK\x03\x04" + bytes(60),
    "junk": b"\x80\x04junk",
    "a broken header": headed(b"{'descr': '<f4', ((("),
    "a header of nothing": headed(b"{'descr': (), 'fortran_order': False, 'shape': (1,)}\n"),
    "a huge shape": headed(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 100000000)}\n"),
    "an impossible shape": headed(b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d,)}\n" % 10**30),
}


@check_each("case", [*BAD, *DAMAGED, "a missing file", "no key", "a path", "an object"])
def test_actions_that_cannot_be_used_are_bad_by_name(world, samples, case):
    metadata = samples[2].prompt.metadata
    metadata["actions"] = "wrong.npy"
    if case in BAD:
        np.save(world / "wrong.npy", BAD[case])
    elif case in DAMAGED:
        (world / "wrong.npy").write_bytes(DAMAGED[case])
        with pytest.raises(DataError, match=r"library: .*wrong.npy cannot be read: damaged"):
            load_trajectory_library(world / "wrong.npy", (4, 2), None)
    elif case == "no key":
        del metadata["actions"]
    elif case == "a path":
        metadata["actions"] = "../2.actions.npy"
    elif case == "an object":
        np.save(world / "wrong.npy", np.array([{}], dtype=object), allow_pickle=True)
    else:
        metadata["actions"] = "nowhere.npy"
    settings = {"global_batch": 3, "seed": 0, "shuffle": False, "max_bad_fraction": 0.9}
    source = BatchSource(samples, framings=[framing()], inputs=reader(), **settings)
    batch = source.read_batch(1, 0, 1)
    source.close()
    assert [sample.sample_id for sample in batch] == ["0", "1", "1"]  # a substitute replaces the bad sample
    assert source.bad == {"bad_actions": 1}


def test_a_domain_must_be_a_number_and_the_model_has_a_say(samples):
    samples[0].prompt.metadata["domain"] = "pusht"
    with pytest.raises(
        BadMedia, match=r"pusht is not an .npy file below the folder of the image or video \(bad_input\)"
    ):
        reader().load_prompt(samples[0], framing(), draw_centre)

    def refuse(told):
        raise ValueError("the domain must be from 0 to 3")

    with pytest.raises(BadMedia, match=r"from 0 to 3 \(bad_actions\)"):
        replace(reader(), validate=refuse).load_prompt(samples[1], framing(), draw_centre)


def test_each_data_set_of_a_mixture_reads_and_validates_the_actions_of_all_clips(samples):
    layout, validated = ClipLayout(5, 1), {2: [], 8: []}
    scalings = {scale: ActionScaling(np.zeros(2), np.full(2, scale), 0.0) for scale in validated}
    parts = {scale: replace(reader(), validate=validated[scale].append, scaling=scalings[scale]) for scale in validated}
    mixture = layout.extend_reader(replace(reader(), sets={str(scale): part for scale, part in parts.items()}), 3)
    for scale, clips in validated.items():
        sample = replace(samples[1], id=f"{scale}/clip")
        actions = mixture.load_prompt(sample, framing(num_frames=1, span=13), draw_centre).inputs["actions"]
        np.testing.assert_array_equal(actions[:, 0] * scale, np.arange(14, 26))  # numbers of the frames in the middle
        assert [clip["actions"].tolist() for clip in clips] == [actions[k : k + 4].tolist() for k in (0, 4, 8)]


def test_files_that_are_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(DataError, match="is not a regular file"):
        load_trajectory_library(tmp_path / "pipe.npy", (4, 2), None)
    with pytest.raises(DataError, match="is not a regular file"):
        load_scaling(ActionsRecipe(stats=tmp_path / "pipe.npy", normalize="meanstd"))


def test_scales(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"q01": [0, -1], "q99": [4, -1], "mean": [1, 2], "std": [2, 0]}))
    raw = np.float32([[0, 5], [4, 6], [3, 7]])
    quantile = load_scaling(ActionsRecipe(stats=tmp_path / "s.json", normalize="quantile"))
    assert quantile(raw).tolist() == [[-1, 0], [1, 0], [0.5, 0]]  # a constant dimension becomes 0
    assert load_scaling(ActionsRecipe(stats=tmp_path / "s.json", normalize="meanstd"))(raw)[:, 0].tolist() == [
        -0.5,
        1.5,
        1,
    ]
    assert load_scaling(ActionsRecipe()) is None


LEROBOT = r"is a LeRobot file\. .* not computed over all rows\. Set stats: data"


@check_each(
    ("stats", "normalize", "says"),
    [
        ({"mean": [1]}, "meanstd", "must be a JSON object with the lists mean and std"),
        ("[" * 99999, "meanstd", "must be a JSON object with the lists mean and std"),
        ({"mean": [1], "std": [1, 2]}, "meanstd", "must be lists of equal length"),
        ({"mean": [1, 2], "std": [1, math.nan]}, "meanstd", "has NaN or infinite numbers"),
        ({"mean": [1, 2], "std": [1, -2]}, "meanstd", "std in .*s.json is negative at index 1"),
        ({"q01": [5, 0], "q99": [4, 1]}, "quantile", "q01 in .*s.json exceeds q99 at index 0"),
        *(({"action": {"mean": [0], "q01": [-1], "q99": [1]}}, kind, LEROBOT) for kind in ("quantile", "meanstd")),
    ],
)
def test_stats_that_cannot_be_used_are_refused(tmp_path, stats, normalize, says):
    (tmp_path / "s.json").write_text(stats if isinstance(stats, str) else json.dumps(stats))
    with pytest.raises(DataError, match=says):
        load_scaling(ActionsRecipe(stats=tmp_path / "s.json", normalize=normalize))


def test_a_tar_holds_actions_beside_its_clips(world, tmp_path):
    members = [(name, (world / name).read_bytes()) for name in ("1.mp4", "1.json", "1.actions.npy")]
    write_tar(tmp_path / "a.tar", members)
    [sample] = TarShards([str(tmp_path / "a.tar")], cache_dir=None, max_bad_fraction=0).samples
    told = reader().load_prompt(sample, framing(), drawn(1)).inputs["actions"]
    assert told[:, 1].tolist() == [1] * 4
