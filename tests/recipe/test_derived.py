import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.run_sizes import derive_run_sizes, num_replicas
from wfm_ds.recipe.schema import Recipe


def nft(groups=4, size=4, updates=1, micro=8, fraction=0.99, steps=10, **engine):
    return Recipe.model_validate(
        {
            "run": {"output_dir": "out", "steps": 3},
            "model": {"path": "tiny:sd3"},
            "engine": {"micro_batch_size": micro, **engine},
            "data": {"kind": "prompts", "path": "p"},
            "sampling": {"height": 32, "width": 32, "steps": steps},
            "algorithm": {"name": "diffusion_nft", "timestep_fraction": fraction, "updates_per_rollout": updates},
            "rollout": {"prompts_per_step": groups, "group_size": size},
            "reward": {"functions": [{"name": "color"}]},
        }
    )


def test_numbers_of_an_rl_step():
    derived = derive_run_sizes(nft(updates=2), world_size=2)
    assert derived.samples_per_rank == 8
    assert derived.terms_per_rank == 4 * 9  # half of the rank's samples per update, 9 of 10 noise levels
    assert derived.accumulation == 5  # 36 terms in micro-batches of 8
    assert derived.total_updates == 6


def test_candidates_are_counted_beside_the_samples_that_are_trained_on():
    recipe = nft()
    sampling = recipe.sampling.model_dump(exclude_unset=True) | {"explore": {"group_size": 7, "steps": 3}}
    derived = derive_run_sizes(Recipe.model_validate(recipe.model_dump(exclude_unset=True) | {"sampling": sampling}), 8)
    assert (derived.samples_per_rank, derived.candidates_per_step, derived.candidates_per_rank) == (2, 28, 4)
    assert derived.summary_lines()[2] == "candidates per step        28 (4 per rank)"
    assert not any("candidates" in line for line in derive_run_sizes(recipe, 8).summary_lines())


@given(st.integers(1, 6), st.integers(2, 6), st.integers(1, 3), st.integers(1, 8))
def test_samples_are_split_equally_or_refused_with_the_numbers(groups, size, updates, world):
    recipe = nft(groups, size, updates)
    if groups * size % (world * updates):
        with pytest.raises(RecipeError, match=rf"= {groups} \* {size} = {groups * size} samples"):
            derive_run_sizes(recipe, world)
    else:
        assert derive_run_sizes(recipe, world).samples_per_rank * world == groups * size


def test_replicas_split_the_work_like_single_ranks():
    alone, shared = derive_run_sizes(nft(updates=2), 2), derive_run_sizes(nft(updates=2, sequence_parallel=4), 8)
    assert shared == dataclasses.replace(alone, world_size=8, sequence_parallel=4)
    assert (shared.num_replicas, shared.replicas_text, alone.replicas_text) == (2, "2 replicas of 4 ranks", "2 ranks")
    assert shared.summary_lines()[:2] == [
        "ranks                      8 (2 replicas of 4 ranks)",
        "samples per step           16 (8 per replica)",
    ]
    assert shared.summary_lines()[2].startswith("loss terms per replica     36 per")
    assert alone.summary_lines()[2].startswith("loss terms per rank        36 per")
    with pytest.raises(RecipeError, match=r"not divisible by 3 replicas of 2 ranks \* 1 algorithm"):
        derive_run_sizes(nft(sequence_parallel=2), 6)


def test_sequence_parallelism_divides_the_ranks_and_stays_on_a_node():
    recipe = nft(sequence_parallel=4)
    assert num_replicas(recipe, 16, ranks_per_node=8) == 4
    with pytest.raises(RecipeError, match=r"parallel 4 does not divide the 6 ranks: set it to a divisor of 6, or"):
        num_replicas(recipe, 6)
    with pytest.raises(RecipeError, match=r"divide the 2 ranks of a node: .* or use a multiple of 4 ranks of a nod"):
        num_replicas(recipe, 16, ranks_per_node=2)
    with pytest.raises(RecipeError, match="does not divide the 2 ranks"):
        derive_run_sizes(recipe, 2)
    with pytest.raises(RecipeError, match=r"engine\.gradient_accumulation is derived"):
        derive_run_sizes(nft(gradient_accumulation=2), world_size=1)


@check_each(
    ("sampling", "algorithm", "count"),
    [
        ({}, {"name": "diffusion_nft", "timestep_fraction": 0.5}, 5),
        ({"solver": "flow_sde"}, {"name": "flow_grpo"}, 9),  # every step except the last is a Gaussian draw
        ({"solver": "flow_sde"}, {"name": "flow_grpo", "timestep_fraction": 0.01}, 1),
        ({"solver": "edm_2ab"}, {"name": "ddrl", "train_on": [0, 3, -1]}, 3),
    ],
)
def test_each_algorithm_gives_the_number_of_trained_noise_levels(sampling, algorithm, count):
    values = nft().model_dump(mode="json") | {"algorithm": algorithm}
    values["sampling"] |= sampling
    assert derive_run_sizes(Recipe.model_validate(values), world_size=2).terms_per_rank == 8 * count
