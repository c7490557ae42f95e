import dataclasses
from types import SimpleNamespace

import pytest
import torch

from benchmarks.forward_counts import count_rl_step
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.algorithms.dgpo import Dgpo
from wfm_ds.recipe.run_sizes import derive_run_sizes

FP64 = torch.float64
ADVANTAGES = [0.5, -1.5, None, 1.0, 0.0, -1.0]  # two groups of three


def dgpo(**keys):
    recipe = recipe_of(**keys)
    built = build_rl_algorithm(
        recipe,
        torch.linspace(1, 0, 6, dtype=FP64),
        SimpleNamespace(flow_shift=lambda sampling: 3.0, clean_frame_range=tuple, stream_sizes=lambda sampling: {}),
    )
    assert isinstance(built, Dgpo)
    return built


def draw_velocity(batch, seed=1):
    """Return the velocities of the trained policy, the reference and the old policy."""
    draw = torch.Generator().manual_seed(seed)
    v, *noise = (torch.randn(batch.clean_latents.shape, generator=draw) for _ in range(3))
    return v.requires_grad_(), *(v.detach() + 0.1 * other for other in noise)


def recipe_of(**keys):
    return rl_recipe({"name": "dgpo", **keys}, rollout={"group_size": 3})


def samples():
    draw = torch.Generator().manual_seed(0)
    return [make_rollout(i, torch.randn(2, 3, 5, generator=draw), group_id=f"g{i // 3}") for i in range(6)]


def terms_of(algorithm):
    (terms,) = algorithm.updates(on_one_rank(samples()), ADVANTAGES, 1)
    return terms


@pytest.mark.parametrize("levels", [{}, {"levels": "stratified", "num_levels": 3}])
def test_levels_and_noise_are_equal_within_a_group_and_differ_between_groups(levels):
    algorithm = dgpo(**levels)
    terms = terms_of(algorithm)
    of_row = [[(t.sigma, t.noise_seed) for t in terms if t.row == row] for row in range(6)]
    assert of_row[0] == of_row[1] == of_row[2]
    assert of_row[3] == of_row[4] == of_row[5]
    assert not {seed for _, seed in of_row[0]} & {seed for _, seed in of_row[3]}
    batch = algorithm.assemble([terms[0], next(t for t in terms if t.row == 1)], samples(), torch.device("cpu"))
    assert torch.equal(batch.noise[0], batch.noise[1])


@pytest.mark.parametrize("keys", [{}, {"kl_beta": 0.5}, {"clip_ratio": 0.03, "kl_beta": 0.5}])
def test_loss_and_gradient_equal_float64_of_whole_groups(keys):
    keys = {"clip_ratio": None, "kl_beta": 0.0} | keys
    algorithm = dgpo(beta=30.0, levels="stratified", num_levels=2, **keys)
    terms = terms_of(algorithm)
    batch = algorithm.assemble(terms, samples(), torch.device("cpu"))
    velocity, ref, old = draw_velocity(batch)
    refs = {"ref": ref, "old": old}
    with torch.no_grad():
        groups, parts = algorithm.group_statistics(terms, velocity, batch, refs)
    sums = [sum(parts[j] * terms[j].weight for j in range(len(terms)) if groups[j] == group) for group in groups]
    batch_with_sums = dataclasses.replace(batch, group_statistics=torch.stack(sums))
    loss_B, stats = algorithm.loss(velocity, batch_with_sums, refs)
    (gradient,) = torch.autograd.grad((loss_B * batch.weight).sum(), velocity)

    def errors(v):
        return (v.double() - (batch.noise.double() - batch.clean_latents.double())).square().flatten(1).mean(1)

    l_B, l_ref_B, l_old_B = errors(velocity.detach()), errors(ref), errors(old)
    num_clipped = 0
    for j, term in enumerate(terms):
        advantage = ADVANTAGES[term.row]
        siblings = [i for i, other in enumerate(terms) if (other.row // 3, other.sigma) == (term.row // 3, term.sigma)]
        assert len(siblings) == 3
        inner = sum((ADVANTAGES[terms[i].row] or 0.0) * 30.0 * (l_B[i] - l_ref_B[i]) / 3 for i in siblings)
        weight = torch.sigmoid(inner)
        assert stats["dgpo/group_weight"][j].item() == pytest.approx(weight.item(), rel=1e-4)
        want = weight * (advantage or 0.0)
        away = velocity[j].detach().double() - ref[j].double()
        kl = keys["kl_beta"] * away.square().mean()
        assert loss_B[j].item() == pytest.approx((want * l_B[j] + kl).item(), rel=1e-4, abs=1e-9)
        ratio, clip = torch.exp(l_old_B[j] - l_B[j]), keys["clip_ratio"] or torch.inf
        clipped = ratio > 1 + clip if want > 0 else ratio < 1 - clip
        num_clipped += int(clipped and want != 0)
        u = (batch.noise[j] - batch.clean_latents[j]).double()
        of_v = (~clipped * want * (velocity[j].detach().double() - u) + keys["kl_beta"] * away) * 2 / u.numel()
        torch.testing.assert_close(gradient[j].double(), batch.weight[j] * of_v, rtol=1e-4, atol=1e-7)
    assert (num_clipped > 0) == (keys["clip_ratio"] is not None)


def test_groups_share_their_levels_which_are_among_the_first_ones():
    algorithm = dgpo(first_levels=3, num_levels=2)
    terms = terms_of(algorithm)
    levels = [{t.sigma for t in terms if t.row == row} for row in range(6)]
    assert all(each == levels[0] for each in levels)
    drawn = {level for step in range(20) for _, level in algorithm.noise_levels(step, "g")}
    assert drawn == set(algorithm.sigmas[:3])
    for keys in ({"first_levels": 6}, {"first_levels": 2, "num_levels": 3}):
        with pytest.raises(ValueError, match="first_levels"):
            recipe_of(**keys)


def test_the_old_policy_is_a_copy_at_first_and_then_follows():
    decays = [dgpo().policy_decays(step, step)["old"] for step in (1, 2, 1000)]
    assert decays == pytest.approx([0, 0.001, 0.3])
    assert dgpo(clip_ratio=None).policy_decays(5, 5) == {}
    assert recipe_of(clip_ratio=None).algorithm.list_policies(None) == {"ref"}


def test_at_the_reference_every_group_has_weight_one_half():
    algorithm = dgpo(kl_beta=0)
    terms = terms_of(algorithm)
    batch = algorithm.assemble(terms, samples(), torch.device("cpu"))
    velocity = draw_velocity(batch)[0].detach()
    assert not algorithm.group_statistics(terms, velocity, batch, {"ref": velocity})[1].any()
    assert [term.row for term in terms if algorithm.has_gradient(term, frozenset())] == [
        term.row for term in terms if ADVANTAGES[term.row]
    ]


def test_group_statistics_need_one_more_forward_per_term():
    recipe = recipe_of()
    forwards = count_rl_step(
        recipe, derive_run_sizes(recipe, 1), build_rl_algorithm(recipe, torch.linspace(1, 0, 6, dtype=FP64)), 3
    )
    assert forwards["group_statistics"] == forwards["policy"]
    assert forwards["ref"].samples == forwards["ref"].without_adapters == forwards["policy"].samples
    assert forwards["old"].samples == forwards["policy"].samples
