"""Action spaces: presets equal cosmos-framework's numbers and float64 matrices; clips of episodes, statistics, sets."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from folders import sft_recipe
from wfm_ds.data.action_data import ActionData, add_viewpoints, load_action_data
from wfm_ds.data.action_space import PRESETS, ActionSpace
from wfm_ds.data.action_statistics import compute_statistics, load_statistics
from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.samples import LocalFile, Sample, pack_prompt, unpack_prompt
from wfm_ds.data.trajectories import compose_actions
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import EMBODIMENTS, ActionsRecipe, is_rotation
from wfm_ds.types import Prompt

RECORDED = {
    name: ({feature: np.float32(values) for feature, values in case["rows"].items()}, np.array(case["actions"]))
    for name, case in json.loads(Path(__file__).with_name("cosmos_actions.json").read_text()).items()
    if name != "note"
}
"""{preset: (rows of five frames, the four actions of cosmos-framework)}. droid has two layouts."""
LAST_SIX_DIGITS = {"atol": 1.5e-6, "rtol": 0}


def space(**actions):
    return ActionSpace.from_recipe(ActionsRecipe(**actions))


# Independent float64 formulas


def about(axis, angle):
    c, s = math.cos(angle), math.sin(angle)
    return np.array({"x": [[1, 0, 0], [0, c, -s], [0, s, c]], "y": [[c, 0, s], [0, 1, 0], [-s, 0, c]],
                     "z": [[c, -s, 0], [s, c, 0], [0, 0, 1]]}[axis])  # fmt: skip


def of_euler(x, y, z):
    return about("z", z) @ about("y", y) @ about("x", x)


def of_quaternion(x, y, z, w):
    """Rotate the unit vectors by q v q*, written with cross products."""
    v, w = np.array([x, y, z]) / math.hypot(x, y, z, w), w / math.hypot(x, y, z, w)
    return np.stack([e + 2 * np.cross(v, np.cross(v, e) + w * e) for e in np.eye(3)], axis=1)


def of_vector(x, y, z):
    """Return the series of exp of the vector's cross product matrix."""
    generator, power, total = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]), np.eye(3), np.eye(3)
    for n in range(1, 40):
        power = power @ generator / n
        total = total + power
    return total


def rigid(rotation=None, position=(0, 0, 0)):
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = np.eye(3) if rotation is None else rotation, position
    return matrix


def motions(poses):
    deltas = [np.linalg.inv(before) @ after for before, after in itertools.pairwise(poses)]
    return np.array([[*delta[:3, 3], *delta[:3, 0], *delta[:3, 1]] for delta in deltas])


# The chain of matrices of each preset as cosmos-framework multiplies them, and how it reads the stored numbers.
BRIDGE_TOOL = [
    rigid(np.array([[0, 0, 1], [0, 1, 0], [-1, 0, 0]])),  # R_state -> kinematics
    rigid(None, (-0.093575, 0, 0)),
    rigid(np.array([[0, 0, 1], [-1, 0, 0], [0, -1, 0]])),
]
FRACTAL_TOOL = [
    np.array(
        [
            [0.9999897671, -0.0008686425, 0.0044397163, -0.0050618476],
            [0.0008745501, 0.9999987346, -0.0013288658, -0.0016717725],
            [-0.0044385564, 0.0013327349, 0.9999892615, -0.1635144743],
            [0, 0, 0, 1],
        ]
    ),
    rigid(about("z", -math.pi / 2)),
]
UMI = "observation.state.right_main_camera_trajectory_xyz_wxyz"
CHAINS = {
    "droid": ("observation.state.cartesian_position", of_euler, slice(3, 6), [rigid(about("z", math.pi / 2))]),
    "droid flat": ("observation.state", of_euler, slice(3, 6), [rigid(about("z", math.pi / 2))]),
    "bridge": ("observation.state", of_euler, slice(3, 6), BRIDGE_TOOL),
    "fractal": ("observation.state", of_quaternion, slice(3, 7), FRACTAL_TOOL),
    "umi": (UMI, lambda w, x, y, z: of_quaternion(x, y, z, w), slice(3, 7), [rigid(None, (0, 0.086, 0.09))]),
}
GRIPPERS = {
    "droid": lambda rows, frames: 1 - rows["action.gripper_position"][frames[:-1], :1],
    "umi": lambda rows, frames: rows["observation.state.right_gripper_width_m"][frames[1:]],
}


def reference_actions(name, rows, frames):
    feature, rotation, columns, tools = CHAINS[name]
    poses = []
    for state in rows[feature][list(frames)].astype(np.float64):
        pose = rigid(rotation(*state[columns]), state[:3])
        for tool in tools:
            pose = pose @ tool
        poses.append(pose)
    gripper = GRIPPERS.get(name, lambda rows, frames: rows["action"][frames[:-1], 6:7])
    return np.concatenate([motions(poses), gripper(rows, list(frames))], axis=1)


def test_presets_give_the_numbers_of_cosmos_framework():
    for name, (rows, want) in RECORDED.items():
        preset = space(space=name.split()[0])
        got = preset(rows, range(5))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, **LAST_SIX_DIGITS, err_msg=name)
        assert set(preset.find_features({feature: array.shape[1] for feature, array in rows.items()})) == set(rows)
    assert {name.split()[0] for name in RECORDED} == PRESETS.keys()
    assert all(robot.space in (None, *PRESETS) for robot in EMBODIMENTS.values())


@given(st.sampled_from(sorted(CHAINS)), st.lists(st.integers(0, 4), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_poses_are_products_of_matrices_at_any_frames(name, frames, seed):
    draws, rows = np.random.default_rng(seed), dict(RECORDED[name][0])
    feature, frames = CHAINS[name][0], sorted(frames)
    rows[feature] = draws.normal(size=rows[feature].shape).astype(np.float32)
    got = space(space=name.split()[0])(rows, frames)
    np.testing.assert_allclose(got, reference_actions(name, rows, frames), atol=2e-6)


def test_agibot_motions_compose():
    """The motions of all steps multiply to the motion of a slower clip, and a closed gripper reads 0."""
    rows, _ = RECORDED["agibot"]
    agibot = space(space="agibot")
    steps, slow = agibot(rows, range(5)), agibot(rows, [0, 2, 4])
    for pose in (slice(0, 9), slice(9, 18), slice(19, 28)):
        np.testing.assert_allclose(compose_actions(steps[:, pose], [0, 2, 4], "pose"), slow[:, pose], atol=2e-6)
    gripper = "observation.states.effector.position"
    assert agibot(rows | {gripper: np.float32([[0, 0], [0, 0], [60, 120], [120, 124], [30, 0]])}, range(5))[
        :, [28, 18]
    ].tolist() == [[1, 1], [0.5, 0], [0, 0], [0.75, 1]]
    with pytest.raises(ValueError, match=r"effector.position has -0.5, expected 0 to 125"):
        agibot(rows | {gripper: np.full((5, 2), -0.5, np.float32)}, range(5))


def test_a_turn_may_be_rounded_to_three_digits():
    x, y = np.ones(3) / math.sqrt(3), np.array([1, -1, 0]) / math.sqrt(2)
    rows = np.round([x, y, np.cross(x, y)], 3)
    assert is_rotation(rows)
    for wrong in (rows * 1.002, rows * [[1], [1], [-1]], rows[[0, 0, 2]]):
        assert not is_rotation(wrong)


def test_libero_turns_stored_motions_into_nine_numbers():
    rows, _ = RECORDED["libero"]
    want = [[*row[:3], *of_vector(*row[3:6])[:, 0], *of_vector(*row[3:6])[:, 1], row[6]] for row in rows["action"][1:4]]
    np.testing.assert_allclose(space(space="libero")(rows, range(1, 5)), want, atol=1e-6)
    with pytest.raises(ValueError, match=r"skips or repeats frames.*set data.fps to the rate of the file"):
        space(space="libero")(rows, [0, 2])


def test_own_spaces_read_any_format_of_rotations():
    draws, axes = np.random.default_rng(3), about("x", 0.7)
    vectors, places = draws.normal(size=(6, 3)), draws.normal(size=(6, 3))
    matrices = [of_vector(*vector) for vector in vectors]
    half = np.linalg.norm(vectors, axis=1, keepdims=True) / 2
    unit = vectors / (2 * half) * np.sin(half)
    numbers = {
        "axis_angle": vectors,
        "quat_xyzw": np.concatenate([unit, np.cos(half)], 1),
        "quat_wxyz": 3 * np.concatenate([np.cos(half), unit], 1),
        "rot6d": [[*m[:, 0], *m[:, 1]] for m in matrices],
        "euler_xyz": [
            [math.atan2(m[2, 1], m[2, 2]), math.asin(-m[2, 0]), math.atan2(m[1, 0], m[0, 0])] for m in matrices
        ],
    }
    frames, grip = [0, 1, 4, 5], np.arange(12, dtype=np.float32).reshape(6, 2)
    tool = rigid(axes, (0.1, 0.2, 0.3))
    poses = motions([rigid(matrices[i], places[i]) @ tool for i in frames])
    for rotation, values in numbers.items():
        state = np.concatenate([np.zeros((6, 1)), places, values], 1).astype(np.float32)
        own = {
            "poses": [
                {
                    "feature": "state",
                    "at": f"1:{state.shape[1]}",
                    "rotation": rotation,
                    "turn": axes.tolist(),
                    "shift": [0.1, 0.2, 0.3],
                }
            ],
            "then": [{"feature": "grip", "at": "1:2", "invert": True}, {"feature": "grip", "row": "next"}],
        }
        got = space(space=own)({"state": state, "grip": grip}, frames)
        np.testing.assert_allclose(got[:, :9], poses, atol=2e-6, err_msg=rotation)
        assert got[:, 9:].tolist() == [[0, 2, 3], [-2, 8, 9], [-8, 10, 11]]


def test_stored_actions_are_those_of_a_file():
    rows = {"action": np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)}
    for actions, frames in (
        ({}, [2, 3, 4]),
        ({"compose": "sum"}, [0, 3, 8]),
        ({"space": {"feature": "action"}}, [7, 8]),
    ):
        want = compose_actions(rows["action"][:-1], frames, actions.get("compose"))
        assert (space(**actions)(rows, frames) == want).all()
    assert (space(space={"feature": "delta"})({"delta": rows["action"]}, [1, 2]) == rows["action"][1]).all()


def pose_space(at, rotation):
    return {"poses": [{"feature": "state", "at": at, "rotation": rotation}]}


class CountingRows(dict):
    """Features that count their reads."""

    reads = 0

    def __getitem__(self, name):
        self.reads += 1
        return super().__getitem__(name)


def test_each_feature_is_read_once_for_a_clip():
    for preset in ("droid flat", "agibot"):
        rows = CountingRows(RECORDED[preset][0])
        parts = ActionSpace.from_recipe(ActionsRecipe(space=preset.split()[0]))
        parts(rows, [0, 1])
        assert rows.reads == len(parts.find_features({name: values.shape[1] for name, values in rows.items()}))


BAD_ROWS = {
    r"state is \[5, 6\], the clip needs row 5": ({"feature": "state"}, np.ones((5, 6)), [4, 5]),
    r"a quaternion is 0 0 0 0": (pose_space("0:7", "quat_xyzw"), np.zeros((5, 7)), [0, 1]),
    r"two parallel columns": (pose_space("0:9", "rot6d"), np.ones((5, 9)), [0, 1]),
    r"state is \[5, 5\], .* 6 numbers": (pose_space("0:6", "euler_xyz"), np.ones((5, 5)), [0, 1]),
}


@check_each("says", BAD_ROWS)
def test_rows_that_cannot_be_used_are_refused(says):
    own, state, frames = BAD_ROWS[says]
    with pytest.raises(ValueError, match=says):
        space(space=own)({"state": np.float32(state)}, frames)


def test_features_that_do_not_exist_are_named_with_their_neighbours():
    stored = {"action": 7, "observation.state.cartesian": 6, "timestamp": 1}
    with pytest.raises(DataError, match=r"no feature .*cartesian_position. It has observation.state.cartesian, "):
        space(space="droid").find_features(stored)
    with pytest.raises(DataError, match=r"observation.state has 5 numbers per frame, the space reads 6"):
        space(space="bridge").find_features({"action": 7, "observation.state": 5})
    with pytest.raises(DataError, match=r"no feature acton. It has action, "):
        space(space={"feature": "acton"}).find_features(stored)
    with pytest.raises(DataError, match="no feature action"):
        space().find_features({})
    assert space(space="droid").find_features({"action": 7, "observation.state": 8}) == ["observation.state", "action"]


# Episodes


def episode_samples(rows_by_name, fps=16.0, prefix=""):
    """Return one sample of each episode."""
    samples = []
    for name, rows in rows_by_name.items():
        length, name = len(next(iter(rows.values()))), f"{prefix}{name}"
        video = EpisodeVideo(name, (), fps, 0, length)
        samples.append(Sample(id=name, media=video, prompt=Prompt(id=name, text="push"), rows=rows))
    return samples


def walk(length, seed):
    """Return rows like those of DROID's flat layout."""
    draws = np.random.default_rng(seed)
    return {
        "observation.state": draws.normal(size=(length, 8)).astype(np.float32),
        "action": draws.uniform(size=(length, 7)).astype(np.float32),
    }


EPISODES = {f"e{i}": walk(length, i) for i, length in enumerate((20, 7, 31))}
DROID = {"kind": "lerobot", "path": "/data", "inputs": ["actions", "domain"], "domain": "droid_lerobot"}


def lerobot_recipe(**data):
    return sft_recipe(DROID | data, num_frames=5)


class Network:
    """The attributes of a model that InputReader uses."""

    uses_clean_frames = True

    def __init__(self):
        self.input_specs = {name: type("Spec", (), {"rank": rank}) for name, rank in (("actions", 2), ("domain", 0))}

    def encode_inputs(self, inputs, num_frames, size):
        assert all(len(row["actions"]) == num_frames - 1 for row in inputs)


def read(recipe, samples, training=None, **framing):
    """Return the inputs of each sample as a run reads them."""
    actions = load_action_data(recipe, samples if training is None else training, [])
    reader = InputReader.from_recipe(recipe, Network(), actions)
    frames = Framing(height=8, width=8, num_frames=5, fps=recipe.data.fps, **framing)
    return [reader.load_prompt(sample, frames, draw_centre).inputs for sample in samples]


def test_clips_of_episodes_have_the_actions_between_their_frames():
    samples = episode_samples(EPISODES)
    late = Sample(id="e2#1", media=EpisodeVideo("e2", (), 16.0, 12, 19), prompt=samples[2].prompt, rows=EPISODES["e2"])
    for fps, firsts, step in ((None, (8, 1, 13, 19), 1), (8.0, None, 2)):
        chosen = [*samples, late] if fps is None else [samples[0], samples[2], late]
        firsts = firsts or (5, 11, 17)  # the middle of 11, 22 and 10 free frames
        for inputs, sample, first in zip(
            read(lerobot_recipe(fps=fps, actions={"space": "droid"}), chosen), chosen, firsts, strict=True
        ):
            frames = [first + step * i for i in range(5)]
            want = reference_actions("droid flat", sample.rows, frames)
            np.testing.assert_allclose(inputs["actions"], want, atol=2e-6)
            assert inputs["domain"] == 8


def strided(name, step):
    """Return the actions between all frames of an episode that are `step` frames apart."""
    rows = EPISODES[name]
    starts = range(len(rows["action"]) - step)
    return np.concatenate([reference_actions("droid flat", rows, [i, i + step]) for i in starts])


@check_each("step", (1, 2, 3))
def test_statistics_are_those_of_all_actions_of_the_training_episodes(step):
    fps = None if step == 1 else 16.0 / step
    training = episode_samples({name: EPISODES[name] for name in ("e0", "e2")})
    actions = ActionsRecipe(space="droid", normalize="quantile", stats="data")
    windows = [*training, training[0]]  # further windows of an episode do not count again
    statistics = load_statistics(windows, actions, fps, None)
    rows = np.concatenate([strided(name, step) for name in ("e0", "e2")])
    rank = lambda q: np.quantile(np.sort(rows, axis=0), q, axis=0)  # noqa: E731
    want = {"q01": rank(0.01), "q99": rank(0.99), "mean": rows.mean(0), "std": rows.std(0)}
    for name, numbers in (want | {"min": rows.min(0), "max": rows.max(0)}).items():
        np.testing.assert_allclose(statistics[name], numbers, atol=2e-6, err_msg=name)
    assert statistics == load_statistics(windows, actions, fps, None)
    for normalize, low, high in (("quantile", want["q01"], want["q99"]), ("meanstd", want["mean"] - want["std"], None)):
        high = want["mean"] + want["std"] if high is None else high
        recipe = lerobot_recipe(fps=fps, actions={"space": "droid", "normalize": normalize, "stats": "data"})
        raw = lerobot_recipe(fps=fps, actions={"space": "droid"})
        scaled, plain = (read(one, episode_samples(EPISODES)[::2], training)[1]["actions"] for one in (recipe, raw))
        np.testing.assert_allclose(scaled, 2 * (plain - low) / (high - low) - 1, atol=2e-4)


def test_statistics_of_files_and_what_is_left_out(tmp_path, caplog):
    rows = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    samples = []
    for i, part in enumerate((rows[:20], rows[20:], np.full((3, 2), np.nan))):
        np.save(tmp_path / f"{i}.npy", part)
        prompt = Prompt(id=str(i), text="a", metadata={"actions": f"{i}.npy"})
        samples.append(Sample(id=str(i), media=LocalFile(tmp_path / f"{i}.mp4"), prompt=prompt))
    with caplog.at_level("WARNING"):
        found = load_statistics(samples, ActionsRecipe(), None, tmp_path / "cache")
    assert found == compute_statistics([rows])
    assert "1 of 3 skipped, e.g. 2: NaN" in caplog.text
    with pytest.raises(DataError, match=r"the data has no actions. First error: 0: .* needs data.kind: lerobot"):
        load_statistics(samples, ActionsRecipe(), 8.0, None)
    with pytest.raises(DataError, match=r"actions of \[2, 3\] numbers"):
        compute_statistics([rows, np.zeros((2, 3), np.float32)])


def test_a_domain_has_a_width_and_one_source(tmp_path):
    samples = episode_samples(EPISODES)
    with pytest.raises(
        DataError, match=r"droid_lerobot: 7 numbers per action, the robot has 10: set data.actions.space: d"
    ):
        read(lerobot_recipe(), samples)
    with pytest.raises(DataError, match=r"data.domain 13: 7 numbers per action, the robot has 10: use actions of 10"):
        read(lerobot_recipe(domain=13), samples)
    assert [int(inputs["domain"]) for inputs in read(lerobot_recipe(domain=27), samples)] == [27] * 3
    other = Sample(
        id="x", media=samples[0].media, rows=samples[0].rows, prompt=Prompt(id="x", text="a", metadata={"domain": 3})
    )
    with pytest.raises(BadMedia, match=r"3 in the caption file, but data.domain is 27: remove one of them"):
        read(lerobot_recipe(domain=27), [other])


def mixture(**shared):
    parts = [
        {"kind": "lerobot", "path": "s3://b/droid", "actions": {"space": "droid"}, "viewpoint": "concat_view"},
        {"kind": "lerobot", "path": "s3://b/own", "domain": 27, "actions": {"stats": "data", "normalize": "meanstd"}},
        {"kind": "lerobot", "path": "s3://b/rest"},
    ]
    shared = {"domain": "libero", "actions": {"space": {"feature": "action"}}, "viewpoint": "wrist_view"} | shared
    return sft_recipe({"kind": "sets", "path": "/", "inputs": ["actions", "domain"], "sets": parts, **shared}, 5)


def test_data_sets_of_a_mixture_have_their_own_actions_domain_and_view():
    recipe = mixture()
    recipe.data.sets[0]  # droid inherits the domain libero, whose width is not fixed
    samples = [sample for name in ("droid", "own", "rest") for sample in episode_samples(EPISODES, prefix=f"{name}/")]
    found = read(recipe, samples)
    assert [inputs["actions"].shape[1] for inputs in found] == [10] * 3 + [7] * 6
    assert [int(inputs["domain"]) for inputs in found] == [5] * 3 + [27] * 3 + [5] * 3
    stored = [EPISODES[name]["action"][first : first + 4] for name, first in (("e0", 8), ("e1", 1), ("e2", 13))]
    assert all((inputs["actions"] == want).all() for inputs, want in zip(found[6:], stored, strict=True))
    rows = np.concatenate([rows["action"][:-1] for rows in EPISODES.values()]).astype(float)
    for inputs, want in zip(found[3:6], stored, strict=True):
        np.testing.assert_allclose(inputs["actions"], (want - rows.mean(0)) / rows.std(0), atol=1e-5)
    views = [sample.prompt.viewpoint for sample in add_viewpoints(samples, recipe.data)]
    assert views == ["concat_view"] * 3 + ["wrist_view"] * 6
    alone = {"kind": "lerobot", "path": "s3://b/a"}, {"kind": "lerobot", "path": "s3://b/b"}
    same = sft_recipe({"kind": "sets", "path": "/", "inputs": ["actions"], "sets": list(alone)}, 5)
    assert load_action_data(same, episode_samples(EPISODES, prefix="a/"), []) == ActionData(width=7)


def test_prompts_keep_their_view():
    for prompt in (Prompt(id="a", text="b"), Prompt(id="a", text="b", viewpoint="wrist_view", metadata={"c": 1})):
        assert unpack_prompt(json.loads(json.dumps(pack_prompt(prompt)))) == prompt
    seen = Prompt(id="a", text="b", viewpoint="wrist_view", inputs={"actions": np.float32([[1, 2]])})
    assert unpack_prompt(pack_prompt(seen)).inputs["actions"].tolist() == [[1, 2]]
    assert len(pack_prompt(Prompt(id="a", text="b"))) == 4  # as without views, which digests depend on
