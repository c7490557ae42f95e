"""Runs that select training samples from more candidates: the selection does not depend on the number of ranks. If all
candidates are kept, the run is bitwise equal to a run without selection."""

from pathlib import Path

import pytest
import torch

from forward_counts import counted, predicted
from multi_rank.resuming import assert_equal_runs, records, train_with_own_code, weights
from multi_rank.same_runs import assert_same_runs

REWARDS = Path(__file__).parent / "rewards"
COMMON = [
    *("optimizer.eps=1e-4", "optimizer.lr=3e-2", "run.steps=4", "logging.console=false", "engine.guard=true"),
    *("validation.at_start=false", "sampling.eval_steps=2", "validation.num_prompts=1", "logging.num_samples=1"),
    "engine.max_forward_batch=4",  # rollouts and candidates use the same batch size
]
SHORT, KEEP = "run.steps=2", "algorithm.zero_std=keep"
GROUPS = ["rollout.prompts_per_step=3", "rollout.group_size=4"]
# Only six of twelve prompts have varying rewards. Most steps refill groups; some reach max_refills without success.
PICKY = ["reward.functions=[{name: 'picky_reward:Picky'}]", "reward.max_failed_fraction=1", "rollout.max_refills=2"]
CHOICES = ("rollout/candidates", "rollout/refills", "rollout/groups_dropped", "rollout/regenerated_correlation")


@pytest.fixture
def train(train_tiny):
    def run(where, name, *overrides, **options):
        options |= {"function": train_with_own_code, "folder": str(REWARDS)}
        return train_tiny(where, name, *COMMON, *GROUPS, *overrides, **options)

    return run


def placed_on_rank(owners, drawn):
    """Transfer samples between ranks, check this rank's samples bitwise, and return their ids.

    owners: the rank that generated each sample; drawn: the tensors of each sample.
    """
    import torch

    from wfm_ds.distributed.world import World
    from wfm_ds.rollout.groups import Group, plan_step_samples
    from wfm_ds.rollout.selective_source import SelectedRollouts
    from wfm_ds.types import Prompt, Rollout, Transition

    def made(member, tensors):
        clean, first, second, third, other, last, log_probs, state = tensors
        steps = [(1, first, second), (2, second, third), (4, other, last)]  # the second starts at the end of the first
        return Rollout(
            sample_id=member.sample_id,
            group_id=member.group_id,
            prompt=member.prompt,
            seed=member.seed,
            noise_seed=member.noise_seed,
            clean_latents=clean,
            transitions=[
                Transition(index=k, latents=x, next_latents=y, log_prob=log_probs[0, 0, i], mean=x - y)
                for i, (k, x, y) in enumerate(steps)
            ],
            states={3: state},
        )

    world = World.join()
    groups = [Group(prompt=Prompt(id=str(g), text="a cat")) for g in range(2)]
    members = plan_step_samples(groups, group_size=len(owners) // 2, step=1, run_seed=0)
    rollouts = {m.sample_id: made(m, tensors) for m, tensors in zip(members, drawn, strict=True)}
    ids = [m.sample_id for m in members]
    mine = {i: rollouts[i] for i, owner in zip(ids, owners, strict=True) if owner == world.rank}
    like = made(members[0], torch.zeros_like(drawn[0]))
    selected = SelectedRollouts(world)
    selected._owner_replicas, selected._local_rollouts = dict(zip(ids, owners, strict=True)), mine
    selected._template = like
    got = selected.distribute_evenly(members).local_rollouts
    share = len(ids) // world.size
    wanted = [rollouts[i] for i in ids[world.rank * share : (world.rank + 1) * share]]
    for one, two in zip(got, wanted, strict=True):
        assert (one.sample_id, one.seed, one.prompt) == (two.sample_id, two.seed, two.prompt)
        assert one.clean_latents.equal(two.clean_latents)
        assert one.states.keys() == two.states.keys()
        assert one.states[3].equal(two.states[3])
        assert one.transitions[1].latents.data_ptr() == one.transitions[0].next_latents.data_ptr()
        for a, b in zip(one.transitions, two.transitions, strict=True):
            assert a.index == b.index
            for name in ("latents", "next_latents", "log_prob", "mean"):
                assert getattr(a, name).equal(getattr(b, name))
    return [one.sample_id for one in got]


@pytest.mark.parametrize("owners", [[0, 1] * 4, [1] * 8, [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]])
def test_samples_are_transferred_unchanged_to_the_ranks_that_train_them(owners, two_ranks):
    drawn = torch.randn(8, 8, 2, 3, 5, generator=torch.Generator().manual_seed(1))
    got = two_ranks.run(placed_on_rank, owners=owners, drawn=drawn)
    assert got == [[f"1/0/0/{k}" for k in range(4)], [f"1/1/1/{k}" for k in range(4)]]


def explore(group_size, steps, regenerate):
    return f"sampling.explore={{group_size: {group_size}, steps: {steps}, regenerate: {str(regenerate).lower()}}}"


def trained(folder):
    """Return the metrics by line, without counts of forwards and metrics that only runs with selection have."""
    return [
        {tag: value for tag, value in line.items() if not tag.startswith((*CHOICES, "perf/forward"))}
        for line in records(folder)
    ]


def of_steps(folder, tag):
    return [line[tag] for line in records(folder) if tag in line]


@pytest.mark.long
def test_keeping_all_candidates_equals_a_run_without_selection(train):
    plain, same = train("plain", "sd3_nft", SHORT), train("same", "sd3_nft", SHORT, explore(4, 4, False))
    again, once = (train(str(flag), "sd3_nft", SHORT, explore(8, 4, flag)) for flag in (True, False))
    assert trained(same) == trained(plain) != trained(once)
    assert trained(again) == trained(once)
    assert of_steps(same, "rollout/candidates") == [12.0] * 2
    assert of_steps(again, "rollout/regenerated_correlation") == pytest.approx([1.0] * 2)
    for one, two in ((plain, same), (again, once)):
        assert weights(one, 2).keys() == weights(two, 2).keys()
        assert all(weights(two, 2)[name].equal(tensor) for name, tensor in weights(one, 2).items())
    for folder, forwards in ((plain, 4 * 3), (once, 4 * 6), (again, 4 * 6 + 4 * 3)):
        assert of_steps(folder, "perf/forwards_rollout") == [forwards] * 2


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sd3_nft", [explore(8, 2, False), KEEP]),  # one group is split across both ranks
        ("sd3_nft", [explore(7, 2, True), KEEP]),  # also, one rank has one more candidate than the other
        ("sd3_flow_grpo", [explore(8, 2, True), KEEP, "optimizer.lr=3e-3", "algorithm.clip_ratio=0.03"]),
    ],
)
@pytest.mark.ci_cases("sd3_nft-overrides0")
def test_the_selection_does_not_depend_on_the_number_of_ranks(name, overrides, train):
    one, two = train("one", name, SHORT, *overrides), train("two", name, SHORT, *overrides, ranks=2)
    assert_same_runs(one, two)
    assert counted(one) == predicted(one, 1)
    assert counted(two) == predicted(two, 2)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sd3_nft", []),
        ("sd3_nft", [explore(8, 2, True)]),
        ("sd3_nft", [explore(8, 2, False)]),
        # Transitions are transferred between ranks too, with their log-probabilities and means.
        (
            "sd3_flow_grpo",
            [
                "algorithm.old_log_prob=rollout",
                "algorithm.guard=true",
                "optimizer.lr=3e-3",
                "algorithm.clip_ratio=0.03",
            ],
        ),
    ],
)
@pytest.mark.ci_cases("sd3_nft-overrides0")
def test_refills_are_equal_on_all_ranks_and_after_a_resume(name, overrides, train):
    one, two = train("one", name, *PICKY, *overrides), train("two", name, *PICKY, *overrides, ranks=2)
    assert_same_runs(one, two)
    tags = (*CHOICES[:3], "adv/groups_skipped", "adv/zero_std_ratio")
    steps = list(zip(*(of_steps(one, tag) for tag in tags), strict=True))
    size = 8 if any(word.startswith("sampling.explore") for word in overrides) else 4
    full = [candidates / size - dropped == 3 for candidates, _, dropped, *_ in steps]
    assert [skipped == 0 and constant == 0 for *_, skipped, constant in steps] == full
    assert {refills for (_, refills, *_), whole in zip(steps, full, strict=True) if not whole} <= {2}
    assert any(refills and whole for (_, refills, *_), whole in zip(steps, full, strict=True))
    train("parts", name, *PICKY, *overrides, ranks=2, stop_at=2)
    assert_equal_runs(train("parts", name, *PICKY, *overrides, ranks=2), two)
