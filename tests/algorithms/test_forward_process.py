"""Common parts of the forward-process algorithms: noise levels, noise, and which terms have a gradient."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms.advantages import Rewards, compute_advantages
from wfm_ds.algorithms.base import draw_stratified_sigmas
from wfm_ds.algorithms.diffusion_nft import DiffusionNft
from wfm_ds.errors import ModelError
from wfm_ds.recipe.algorithms import DdrlAlgorithm, FlowGrpoAlgorithm, NftAlgorithm
from wfm_ds.sampling.plan import invert_shift

FP64 = torch.float64
SHIFTED = SimpleNamespace(flow_shift=lambda sampling: 3.0, clean_frame_range=tuple, stream_sizes=lambda sampling: {})
STRATIFIED = {"levels": "stratified", "num_levels": 4}
ADVANTAGES = [0.5, None, 0.0, -2.0]


def recipe_of(*, steps=10, **keys):
    return rl_recipe({"name": "diffusion_nft", **keys}, sampling={"steps": steps})


def algorithm(kind=DiffusionNft, *, steps=10, model=SHIFTED, **keys):
    grid = torch.linspace(1, 0, steps + 1, dtype=FP64)
    return kind(recipe_of(steps=steps, **keys), grid, model)


def samples(count=4):
    draw = torch.Generator().manual_seed(0)
    return [make_rollout(i, torch.randn(2, 4, 4, generator=draw), group_id=f"g{i // 2}") for i in range(count)]


def terms_of(rl, advantages=ADVANTAGES, step=1):
    return [t for update in rl.updates(on_one_rank(samples(len(advantages))), advantages, step) for t in update]


@given(st.integers(1, 12), st.floats(0.3, 8), st.integers(0, 2**40))
@settings(max_examples=50)
def test_stratified_levels_are_one_in_each_part_of_the_unshifted_range(num_levels, shift, seed):
    sigmas = draw_stratified_sigmas(num_levels, shift, seed, 1, 2)
    places = num_levels * invert_shift(torch.tensor(sigmas, dtype=FP64), shift)
    offsets = places - torch.arange(num_levels, dtype=FP64)
    assert bool(((offsets > -1e-5) & (offsets < 1 + 1e-5)).all())
    assert all(0 < s <= 1 and s == float(torch.tensor(s, dtype=torch.float32)) for s in sigmas)
    assert (
        sigmas
        == draw_stratified_sigmas(num_levels, shift, seed, 1, 2)
        != draw_stratified_sigmas(num_levels, shift, seed, 1, 3)
    )


def test_stratified_levels_together_are_uniform_before_the_shift():
    draws = torch.tensor([draw_stratified_sigmas(2, 3.0, 0, key) for key in range(3000)], dtype=FP64)
    counts = torch.histc(invert_shift(draws, 3.0).flatten(), bins=10, min=0, max=1)
    assert ((counts - 600) ** 2 / 600).sum() < 27.9  # chi-square test, 99.9 % quantile, 9 degrees of freedom


def test_stratified_levels_do_not_depend_on_the_rollout_s_steps_and_those_of_the_grid_are_its_own():
    few, many = (terms_of(algorithm(steps=steps, **STRATIFIED)) for steps in (4, 50))
    assert few == many
    grid = torch.linspace(1, 0, 11, dtype=FP64)[:-1].tolist()
    on_grid = terms_of(algorithm(num_levels=3))
    assert {t.sigma for t in on_grid} <= set(grid)
    by_row = [[t.sigma for t in on_grid if t.row == row] for row in range(4)]
    assert all(len(set(sigmas)) == 3 for sigmas in by_row)
    assert len({tuple(sigmas) for sigmas in by_row}) == 4


def test_a_number_of_levels_is_the_same_draw_as_the_share_that_makes_as_many():
    assert terms_of(algorithm(num_levels=5)) == terms_of(algorithm(timestep_fraction=0.5))


@check_each("keys", [{}, {"num_levels": 2}, STRATIFIED, {"timestep_fraction": 0.01}])
def test_the_settings_know_how_many_terms_a_sample_has(keys):
    rl = algorithm(**keys)
    terms = terms_of(rl)
    assert len(terms) == 4 * rl.settings.terms_per_sample(rl.sampling)
    assert [(t.row, t.advantage, t.weight) for t in terms] == [
        (row, a or 0.0, float(a is not None)) for row, a in enumerate(ADVANTAGES) for _ in range(len(terms) // 4)
    ]
    assert len({t.noise_seed for t in terms}) == len(terms)


def test_the_shift_is_the_recipe_s_then_the_model_s():
    assert algorithm(**STRATIFIED).shift == 3.0
    own = algorithm(**STRATIFIED, flow_shift=1.0)
    assert own.shift == 1.0
    q = [invert_shift(torch.tensor(t.sigma, dtype=FP64), 3.0).item() for t in terms_of(algorithm(**STRATIFIED))]
    assert q == pytest.approx([t.sigma for t in terms_of(own)], abs=1e-6)


def test_noisy_latents_are_made_of_the_noise_and_level_of_the_term():
    rl, rollouts = algorithm(**STRATIFIED), samples()
    terms = terms_of(rl)
    batch = rl.assemble(terms, rollouts, torch.device("cpu"))
    level = batch.sigma.view(-1, 1, 1, 1).double()
    mixed = (1 - level) * batch.clean_latents.double() + level * batch.noise.double()
    torch.testing.assert_close(batch.latents.double(), mixed, rtol=0, atol=1e-6)
    assert batch.sigma.tolist() == [t.sigma for t in terms]
    assert batch.credit.tolist() == pytest.approx([0.5 + t.advantage / 10 for t in terms])
    again = rl.assemble(terms[3:5], rollouts, torch.device("cpu"))
    assert torch.equal(again.noise, batch.noise[3:5])


@check_each("beta", [1.0, 0.3])
@check_each("moved", [0.0, 0.1])
def test_terms_are_marked_as_without_gradient_exactly_if_it_is_zero(beta, moved):
    rl, rollouts = algorithm(kl_beta=0, beta=beta), samples()
    advantages = [0.5, 1e-30, 0.0, -2.0]  # the second one has no effect on r in float32
    terms = terms_of(rl, advantages)
    batch = rl.assemble(terms, rollouts, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    velocity = torch.randn(batch.latents.shape, generator=draw).requires_grad_()
    old = velocity.detach() + moved * torch.randn(velocity.shape, generator=draw)
    current = set() if moved else {"old"}
    loss_B, _ = rl.loss(velocity, batch, {"old": old} if moved else {})
    loss_B.sum().backward()
    moves = velocity.grad.flatten(1).any(1).tolist()
    assert [rl.has_gradient(t, current) for t in terms] == moves
    assert any(moves)
    assert all(moves) == bool(moved)


def test_a_distance_to_the_reference_gives_every_term_a_gradient():
    rl = algorithm(kl_beta=1e-4)
    assert all(rl.has_gradient(t, {"old"}) for t in terms_of(rl))


@check_each(
    ("section", "drops"),
    [
        (NftAlgorithm(name="diffusion_nft"), False),
        (NftAlgorithm(name="diffusion_nft", kl_beta=0), True),
        (NftAlgorithm(name="diffusion_nft", kl_beta=0, zero_std="keep"), False),
        (NftAlgorithm(name="diffusion_nft", zero_std="drop"), True),
        (FlowGrpoAlgorithm(name="flow_grpo", kl_beta=0.1), True),
        (DdrlAlgorithm(name="ddrl"), False),
    ],
)
def test_groups_of_equal_rewards_are_dropped_if_only_rewards_give_gradients(section, drops):
    rewards = Rewards([1.0, 1.0, 0.0, 1.0], [(1.0,), (1.0,), (0.0,), (1.0,)], (1.0,), {})
    values = compute_advantages(
        rewards, list("aabb"), section, num_selected=None, drops_zero_std=section.drops_zero_std
    ).values
    assert values[:2] == ([None, None] if drops else [0.0, 0.0])
    assert None not in values[2:]


@check_each(
    ("keys", "message"),
    [
        ({"levels": "stratified"}, "stratified needs num_levels"),
        ({"flow_shift": 3.0}, "flow_shift: only read with levels: stratified"),
        ({"num_levels": 2, "timestep_fraction": 0.5}, "timestep_fraction: only read with num_levels unset"),
        ({"num_levels": 11}, r"num_levels 11 is more than sampling\.steps 10: .*or set algorithm.levels: stratified"),
    ],
)
def test_contradicting_keys_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        recipe_of(**keys)
    assert recipe_of(**STRATIFIED | {"num_levels": 11}).algorithm.num_levels == 11


def test_a_schedule_without_a_fixed_shift_needs_one_in_the_recipe():
    class NoShift:
        def flow_shift(self, sampling):
            raise ModelError("set algorithm.flow_shift")

    def checked(recipe):
        recipe.algorithm.check_model(NoShift(), recipe.sampling)

    with pytest.raises(ModelError, match=r"algorithm\.flow_shift"):
        checked(recipe_of(**STRATIFIED))
    checked(recipe_of(**STRATIFIED, flow_shift=5.0))
    checked(recipe_of())
