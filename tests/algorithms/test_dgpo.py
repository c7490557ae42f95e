import dataclasses
from types import SimpleNamespace

import pytest
import torch

from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.algorithms.dgpo import Dgpo
from wfm_ds.memory.forward_counts import count_rl_step
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.types import Prompt, Rollout

FP64 = torch.float64
ADVANTAGES = [0.5, -1.5, None, 1.0, 0.0, -1.0]  # of two groups of three


def dgpo(**keys):
    recipe = recipe_of(**keys)
    built = build_rl_algorithm(
        recipe,
        torch.linspace(1, 0, 6, dtype=FP64),
        SimpleNamespace(flow_shift=lambda sampling: 3.0, clean_frame_range=tuple),
    )
    assert isinstance(built, Dgpo)
    return built


def recipe_of(**keys):
    return Recipe.model_validate(
        {
            "run": {"output_dir": "out", "steps": 3},
            "model": {"path": "tiny:sd3"},
            "data": {"kind": "prompts", "path": "p"},
            "sampling": {"height": 32, "width": 32, "steps": 5},
            "algorithm": {"name": "dgpo", **keys},
            "rollout": {"prompts_per_step": 2, "group_size": 3},
            "reward": {"functions": [{"name": "color"}]},
        }
    )


def samples():
    draw = torch.Generator().manual_seed(0)
    return [
        Rollout(
            sample_id=str(i),
            group_id=f"g{i // 3}",
            prompt=Prompt(id="p", text="p"),
            seed=100 + i,
            noise_seed=i,
            clean_latents=torch.randn(2, 3, 5, generator=draw),
        )
        for i in range(6)
    ]


def terms_of(algorithm):
    (terms,) = algorithm.updates(SimpleNamespace(local_rollouts=samples(), first_index=0), ADVANTAGES, 1)
    return terms


@pytest.mark.parametrize("levels", [{}, {"levels": "stratified", "num_levels": 3}])
def test_a_group_has_the_same_levels_and_noise_and_another_group_has_others(levels):
    algorithm = dgpo(**levels)
    terms = terms_of(algorithm)
    of_row = [[(t.sigma, t.noise_seed) for t in terms if t.row == row] for row in range(6)]
    assert of_row[0] == of_row[1] == of_row[2]
    assert of_row[3] == of_row[4] == of_row[5]
    assert not {seed for _, seed in of_row[0]} & {seed for _, seed in of_row[3]}
    batch = algorithm.assemble([terms[0], next(t for t in terms if t.row == 1)], samples(), torch.device("cpu"))
    assert torch.equal(batch.noise[0], batch.noise[1])


def test_loss_and_gradient_equal_float64_of_whole_groups():
    algorithm = dgpo(beta=30.0, levels="stratified", num_levels=2)
    terms = terms_of(algorithm)
    batch = algorithm.assemble(terms, samples(), torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    velocity = torch.randn(batch.clean_latents.shape, generator=draw, requires_grad=True)
    refs = {"ref": velocity.detach() + 0.1 * torch.randn(batch.clean_latents.shape, generator=draw)}
    with torch.no_grad():
        groups, parts = algorithm.group_statistics(terms, velocity, batch, refs)
    sums = [sum(parts[j] * terms[j].weight for j in range(len(terms)) if groups[j] == group) for group in groups]
    batch_with_sums = dataclasses.replace(batch, group_statistics=torch.stack(sums))
    loss_B, stats = algorithm.loss(velocity, batch_with_sums, refs)
    (gradient,) = torch.autograd.grad((loss_B * batch.weight).sum(), velocity)

    def errors(v):
        return (v.double() - (batch.noise.double() - batch.clean_latents.double())).square().flatten(1).mean(1)

    l_B, l_ref_B = errors(velocity.detach()), errors(refs["ref"])
    for j, term in enumerate(terms):
        advantage = ADVANTAGES[term.row]
        siblings = [i for i, other in enumerate(terms) if (other.row // 3, other.sigma) == (term.row // 3, term.sigma)]
        assert len(siblings) == 3
        inner = sum((ADVANTAGES[terms[i].row] or 0.0) * 30.0 * (l_B[i] - l_ref_B[i]) / 3 for i in siblings)
        weight = torch.sigmoid(inner)
        assert stats["dgpo/group_weight"][j].item() == pytest.approx(weight.item(), rel=1e-4)
        want = weight * (advantage or 0.0)
        assert loss_B[j].item() == pytest.approx((want * l_B[j]).item(), rel=1e-4, abs=1e-9)
        u = (batch.noise[j] - batch.clean_latents[j]).double()
        of_v = want * 2 * (velocity[j].detach().double() - u) / u.numel()
        torch.testing.assert_close(gradient[j].double(), of_v, rtol=1e-4, atol=1e-7)


def test_at_the_reference_every_group_weighs_one_half_and_only_advantages_teach():
    algorithm = dgpo()
    terms = terms_of(algorithm)
    batch = algorithm.assemble(terms, samples(), torch.device("cpu"))
    velocity = torch.randn_like(batch.clean_latents)
    assert not algorithm.group_statistics(terms, velocity, batch, {"ref": velocity})[1].any()
    assert [term.row for term in terms if algorithm.has_gradient(term, frozenset())] == [
        term.row for term in terms if ADVANTAGES[term.row]
    ]


def test_group_statistics_take_one_more_forward_of_each_term():
    recipe = recipe_of()
    forwards = count_rl_step(
        recipe, derive_run_sizes(recipe, 1), build_rl_algorithm(recipe, torch.linspace(1, 0, 6, dtype=FP64)), 2
    )
    assert forwards["group_statistics"] == forwards["policy"]
    assert forwards["ref"].samples == forwards["ref"].without_adapters == forwards["policy"].samples
    assert "old" not in forwards
