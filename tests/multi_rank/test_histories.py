"""RL runs whose groups continue clips of the policy (rollout.history), and the reward `continuation`."""

from pathlib import Path
from unittest import mock

import pytest

from multi_rank.resuming import train_with_own_code
from multi_rank.same_runs import assert_bitwise_equal, assert_equal_exports, assert_same_runs, records
from steered import write_world
from wfm_ds.rollout.captioned_groups import draw_history_seeds

TESTS = str(Path(__file__).parent.parent)
HISTORY = "rollout.history={clips: 2}"
COMMON = [
    "sampling.num_frames=5",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "engine.max_forward_batch=4",
    "engine.guard=true",
    "optimizer.eps=1e-4",
    "optimizer.lr=3e-2",
    "run.steps=2",
    "logging.console=false",
    "validation.num_prompts=1",
    "validation.at_start=false",
]
GIVEN = "algorithm.min_num_conditional_frames=1"
REWARDS = "reward.functions=[{name: continuation}, {name: 'steered:Obedience', weight: 0.1}]"
CASES = {
    "steered": (
        "cosmos25_i2v_nft",
        "cosmos25",
        ["model.family=steered:Steered", "data.inputs=[actions, domain]", REWARDS],
    ),
    # Conditioned on the pixels of the first frame, without actions.
    "pixels": ("wan22_i2v_nft", "wan22_i2v", ["reward.functions=[{name: continuation}]"]),
    "flow_grpo": ("wan22_ti2v_flow_grpo", "wan22_ti2v", ["reward.functions=[{name: continuation}]", GIVEN]),
    "video": ("cosmos25_i2v_nft", "cosmos25", ["reward.functions=[{name: continuation}]"]),
}
ASYNC = ["rollout.mode=async", "rollout.max_staleness=0"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Five clips of 13 frames with actions: three clips of 5 frames that overlap by one frame."""
    return write_world(tmp_path_factory.mktemp("world") / "long", frames=13)


@pytest.fixture
def train(train_tiny, world):
    """Return a function that trains one of CASES into tmp_path/where."""

    def run(case, where, *overrides, function=train_with_own_code, **options):
        name, family, of_case = CASES[case]
        options |= {"family": family, "data": world, "function": function, "folder": TESTS}
        return train_tiny(where, name, *COMMON, *of_case, HISTORY, *overrides, **options)

    return run


@pytest.mark.parametrize("case", ["steered", "pixels"])
@pytest.mark.ci_cases("pixels")
def test_histories_are_the_same_on_one_rank_on_two_and_with_workers(case, train, tmp_path):
    """On two ranks, both have samples of the second group: one rank sends the other the frames that they continue."""
    for name, ranks, overrides in (("one", 1, []), ("async", 1, ASYNC), ("two", 2, []), ("async_two", 2, ASYNC)):
        train(case, name, *overrides, ranks=ranks)
    assert_bitwise_equal(tmp_path / "one", tmp_path / "async")
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert_same_runs(tmp_path / "one", tmp_path / "async_two")
    (*_, last) = records(tmp_path / "one")
    assert last["val/reward/continuation/failed"] == 0  # validation samples are compared with recordings too
    steps = [line for line in records(tmp_path / "one") if "optim/grad_norm" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["optim/grad_norm"] > 0
        assert step["rollout/history_broken"] == 0
        assert {f"reward/continuation/after_{k}" for k in range(3)} <= step.keys()


def train_with_broken_histories(recipe, overrides, folder):
    """Train. Half of the histories are not finite, the same ones on any number of ranks."""
    from wfm_ds.rollout.histories import HistoryWalker

    def generate_clip(self, group, clip, video, plan):
        return stock(self, group, clip, video, plan)[0], group.history_seeds[0] % 2 == 0

    stock = HistoryWalker.generate_clip
    with mock.patch.object(HistoryWalker, "generate_clip", generate_clip):
        return train_with_own_code(recipe, overrides, folder)


@pytest.mark.long
def test_all_ranks_agree_on_broken_histories(train, tmp_path):
    for ranks, name in enumerate(("one", "two"), 1):
        train("steered", name, ranks=ranks, function=train_with_broken_histories)
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    broken = [line["rollout/history_broken"] for line in records(tmp_path / "one") if "optim/grad_norm" in line]
    seeds = [draw_history_seeds(0, step, 3, 2) for step in (1, 2)]
    assert broken == [sum(bool(group) and group[0] % 2 == 1 for group in step) for step in seeds]
    assert sum(broken) > 0


@pytest.mark.long
def test_a_stopped_run_continues_with_the_same_histories(train, tmp_path):
    train("steered", "whole")
    for stop in (1, None):
        train("steered", "resumed", stop_at=stop)
    assert_bitwise_equal(tmp_path / "resumed", tmp_path / "whole")


def test_training_conditions_samples_on_the_frames_of_their_rollout(train):
    """Otherwise the log-probabilities of rollout and training would differ."""
    steps = [line for line in records(train("flow_grpo", "run")) if "optim/grad_norm" in line]
    assert {step["policy/ratio_start_abs_dev"] for step in steps} == {0.0}
    assert all({f"reward/continuation/after_{k}" for k in range(3)} <= step.keys() for step in steps)


def test_the_ranks_of_a_replica_generate_histories_together(train):
    assert_same_runs(train("video", "one"), train("video", "split", "engine.sequence_parallel=2", ranks=2))


@pytest.mark.long
def test_reading_recordings_does_not_change_a_run_without_history(train, tmp_path):
    """The reward has no weight, so only the data that the run reads differ."""
    logged = "reward.functions=[{name: continuation, weight: 0}, {name: 'steered:Obedience'}]"
    for name, rewards in (("with", logged), ("without", "reward.functions=[{name: 'steered:Obedience'}]")):
        train("steered", name, rewards, "rollout.history={clips: 0}")
    assert_equal_exports(tmp_path / "with", tmp_path / "without")
    assert "reward/continuation/mean" in records(tmp_path / "with")[0]
