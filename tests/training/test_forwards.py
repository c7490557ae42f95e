import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.forward_counts import (
    ForwardCount,
    count_evaluation,
    count_rl_step,
    count_sft_step,
    num_grouped_calls,
    sum_forwards,
)
from each_case import check_each
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.algorithms.base import LossTermBatch
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.training.micro_batches import MicroBatch, group_micro_batches


def nft(**algorithm):
    return rl({"name": "diffusion_nft"}, **algorithm)


def grpo(**algorithm):
    return rl({"name": "flow_grpo", "min_step_std": 0}, {"solver": "flow_sde"}, **algorithm)


def recipe_of(data="prompts", **sections):
    return Recipe.model_validate(
        {
            "run": {"output_dir": "out", "steps": 3},
            "model": {"path": "tiny:sd3"},
            "data": {"kind": data, "path": "p.jsonl" if data == "pairs" else "p"},
            **sections,
        }
    )


def rl(named, sampling=None, *, groups=6, size=4, steps=10, guidance=1.0, engine=None, window=None, **algorithm):
    return recipe_of(
        data="paired" if {**named, **algorithm}.get("data_beta") else "prompts",
        engine=engine or {},
        lora={"rank": 4},
        sampling={
            **{"height": 32, "width": 32, "steps": steps, "guidance_scale": guidance, "window": window},
            **(sampling or {}),
        },
        algorithm={**named, **algorithm},
        rollout={"prompts_per_step": groups, "group_size": size},
        reward={"functions": [{"name": "color"}]},
    )


def distillation(algorithm, *, reward=None, **sampling):
    """Return a recipe that trains on 24 samples of four denoising steps in each RL step."""
    return recipe_of(
        engine={"micro_batch_size": 5, "max_forward_batch": 16},
        lora={"rank": 4},
        sampling={"height": 32, "width": 32, "steps": 4, "eval_steps": 4, **sampling},
        algorithm=algorithm,
        rollout={"prompts_per_step": 12, "group_size": 2},
        reward=None if reward is None else {"functions": [{"name": reward}]},
    )


def step_of(recipe, step, world=1):
    sigmas = torch.linspace(1, 0, recipe.sampling.steps + 1, dtype=torch.float64)
    return count_rl_step(recipe, derive_run_sizes(recipe, world), build_rl_algorithm(recipe, sigmas), step)


def test_diffusion_nft_runs_the_forwards_of_its_formula():
    """Expect S samples per rollout, and one sample each of policy, old and reference per trained noise level."""
    forwards = step_of(nft(engine={"micro_batch_size": 5, "max_forward_batch": 16}), step=2, world=2)
    assert forwards == {
        "rollout": ForwardCount(10, 12 * 10),
        "policy": ForwardCount(math.ceil(12 * 9 / 5), 12 * 9),
        # Three of the 22 micro-batches fit into a forward of 16; the last micro-batch has 3 terms.
        "old": ForwardCount(8, 12 * 9),
        "ref": ForwardCount(8, 12 * 9, without_adapters=12 * 9),
    }


@pytest.mark.parametrize("regenerate", [True, False])
def test_candidates_take_few_steps_and_selected_samples_all_steps(regenerate):
    explore = {"group_size": 10, "steps": 3, "regenerate": regenerate}
    recipe = rl({"name": "diffusion_nft"}, {"explore": explore}, guidance=2.0, engine={"max_forward_batch": 16})
    plain = step_of(rl({"name": "diffusion_nft"}, guidance=2.0, engine={"max_forward_batch": 16}), step=2, world=2)
    forwards = step_of(recipe, step=2, world=2)
    candidates = ForwardCount(2 * 2 * 3, 30 * 3 * 2)  # 30 per rank in two batches, with two forwards for guidance
    assert forwards["rollout"] == (candidates + plain["rollout"] if regenerate else candidates)
    assert {**forwards, "rollout": None} == {**plain, "rollout": None}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 30))
def test_folded_forwards_are_those_that_the_loop_makes(sizes, most):
    batches = [LossTermBatch(latents=None, sigma=range(size), weight=None, prompts=()) for size in sizes]
    micros = [MicroBatch(batch, 0) for batch in batches]
    assert num_grouped_calls(sizes, most) == len(list(group_micro_batches(micros, most)))


@given(st.sampled_from([1.0, 4.0]), st.sampled_from([0.0, 0.1]), st.integers(1, 3), st.integers(2, 9))
def test_guidance_doubles_the_forwards_and_without_kl_the_reference_has_none(w, kl_beta, updates, micro):
    recipe = nft(guidance=w, kl_beta=kl_beta, updates_per_rollout=updates, engine={"micro_batch_size": micro})
    forwards = step_of(recipe, step=5)
    terms = 24 * 9
    asked = ["policy", "old"] + ["ref"] * (kl_beta > 0)
    assert forwards.keys() == {"rollout", *asked} | ({"uncond"} if w > 1 else set())
    assert all(forwards[purpose].samples == terms for purpose in asked)
    assert forwards["rollout"].samples == 24 * 10 * (2 if w > 1 else 1)
    if w > 1:
        assert forwards["uncond"].samples == terms * len(asked)
        assert forwards["uncond"].calls == sum(forwards[purpose].calls for purpose in asked)
        assert forwards["uncond"].without_adapters == (terms if kl_beta else 0)


@check_each(
    ("decay", "share_of_old"),  # fraction of the terms of steps 1, 2, 3, with two updates each
    [
        ("copy", [0.5, 0.5, 0.5]),
        ("standard", [0.5, 1, 1]),
        ({"flat_steps": 3, "initial": 0, "slope": 0.1, "max": 0.5}, [0.5, 0.5, 1]),
    ],
)
def test_old_runs_forwards_only_if_it_differs_from_the_trained_weights(decay, share_of_old):
    recipe = nft(old_decay=decay, updates_per_rollout=2)
    terms = 24 * 9
    assert [step_of(recipe, step)["old"].samples / terms for step in (1, 2, 3)] == share_of_old
    only = nft(old_decay="copy")
    assert all("old" not in step_of(only, step) for step in (1, 2, 3))


@pytest.mark.parametrize("window", [None, {"kind": "random", "size": 2}])
def test_flow_grpo_trains_noisy_steps_and_evaluates_old_only_for_later_updates(window):
    noisy = 9 if window is None else 2
    batches = {"micro_batch_size": 6, "max_forward_batch": 12}
    forwards = step_of(grpo(window=window, engine=batches, updates_per_rollout=3, old_log_prob="recompute"), step=1)
    terms = 24 // 3 * noisy
    assert forwards == {
        "rollout": ForwardCount(20, 240),
        "policy": ForwardCount(3 * math.ceil(terms / 6), 3 * terms),
        "old": ForwardCount(2 * math.ceil(terms / 6), 2 * terms),
    }
    asked = step_of(grpo(window=window, engine=batches, kl_beta=0.1, guidance=4.5), step=7)
    assert asked.keys() == {"rollout", "policy", "ref", "uncond"}
    assert asked["uncond"] == asked["policy"] + asked["ref"]
    assert asked["ref"].samples == asked["ref"].without_adapters == 24 * noisy


@pytest.mark.parametrize(("first_only", "data"), [(False, 24 * 3), (True, 24)])
def test_ddrl_adds_its_data_to_the_trained_samples_and_no_forward(first_only, data):
    settings = {"train_on": [0, 2, 4], "ratio_norm": "std_scaled", "kl_beta": 0.0, "data_on_first_only": first_only}
    recipe = rl({"name": "ddrl", **settings}, {"solver": "edm_2ab"}, data_beta=0.1, engine={"micro_batch_size": 4})
    forwards = step_of(recipe, step=1)
    assert forwards["policy"] == ForwardCount(24 * 3 // 4, 24 * 3 + data)
    assert forwards["rollout"] == ForwardCount(2 * 11, 24 * 11)  # one more evaluation than steps
    del settings["data_on_first_only"]
    without = step_of(rl({"name": "ddrl", **settings}, {"solver": "edm_2ab"}, data_beta=0.0), step=1)
    assert without["policy"].samples == 24 * 3


@pytest.mark.parametrize(("first_only", "data"), [(False, 24 * 3), (True, 24)])
def test_separate_data_adds_a_forward_to_each_micro_batch_with_data(first_only, data):
    settings = {"train_on": [0, 2, 4], "ratio_norm": "std_scaled", "data_on_first_only": first_only, "data_beta": 0.1}
    engine = {"micro_batch_size": 5, "max_forward_batch": 10}
    separate = rl({"name": "ddrl", "data_forward": "separate", **settings}, {"solver": "edm_2ab"}, engine=engine)
    joint = rl({"name": "ddrl", **settings}, {"solver": "edm_2ab"}, engine=engine)
    forwards, terms = step_of(separate, step=2), 24 * 3
    micro_batches = math.ceil((terms - data) / 5) + math.ceil(data / 5)
    assert forwards["policy"] == ForwardCount(micro_batches + math.ceil(data / 5), terms + data)
    assert forwards["ref"].samples == step_of(joint, step=2)["ref"].samples == terms
    assert step_of(joint, step=2)["policy"].samples == forwards["policy"].samples


def test_guidance_in_an_interval_is_counted_only_in_its_range():
    sampling = {"solver": "flow_sde", "guidance": {"interval": [0.65, 1]}}
    recipe = rl({"name": "flow_grpo", "min_step_std": 0}, sampling, guidance=4.5)
    algorithm = build_rl_algorithm(recipe, torch.linspace(1, 0, 11, dtype=torch.float64))
    forwards = count_rl_step(recipe, derive_run_sizes(recipe, 1), algorithm, 1)
    assert forwards["rollout"].samples == 24 * 14  # 4 of 10 levels
    assert forwards["uncond"].samples == forwards["policy"].samples  # training runs the passes of all levels
    sampled = count_evaluation(recipe, 1, num_prompts=1, others=[1] * 7 + [0] * 33)
    assert sampled == {"validation": ForwardCount(47, 47)}


@check_each(("most", "calls"), [(48, 10), (47, 20), (18, 20 + 10), (12, 40)])
def test_joint_guidance_halves_the_forwards_of_batches_that_fit_twice(most, calls):
    """The batches are 24, 24, 18 + 6 and 12 + 12; guidance is joint if twice the batch fits into `most`."""
    settings = {"sampling": {"guidance_batch": "joint"}, "guidance": 2.0, "engine": {"max_forward_batch": most}}
    assert step_of(rl({"name": "diffusion_nft"}, **settings), step=1)["rollout"] == ForwardCount(calls, 24 * 20)


def test_rollouts_with_merged_lora_run_without_adapters():
    recipe = nft(guidance=2.0)
    merged = Recipe.model_validate(
        recipe.model_dump() | {"rollout": recipe.rollout.model_dump() | {"merge_lora": True}}
    )
    assert step_of(merged, step=1)["rollout"].without_adapters == 24 * 20
    assert step_of(recipe, step=1)["rollout"].without_adapters == 0


def test_best_of_n_trains_its_fraction_of_the_samples():
    assert step_of(grpo(best_of_n=2), step=1)["policy"].samples == 24 * 9 // 2


def test_dmd2_runs_the_forwards_of_its_formula():
    """Expect N + 3 r + 3 + 1 + 2 forward passes per sample, if a backward pass counts as two."""
    settings = {"name": "dmd2", "teacher": {"guidance_scale": 4.0}, "fake": {"updates": 5, "warmup_steps": 1}}
    forwards = step_of(distillation(settings), step=2)
    assert forwards == {
        "rollout": ForwardCount(2 * 4, 24 * 4),
        "fake_policy": ForwardCount(5 * 5, 5 * 24),
        "policy": ForwardCount(5, 24),
        "fake": ForwardCount(2, 24),
        "teacher": ForwardCount(2, 24, without_adapters=24),
        "uncond": ForwardCount(2, 24, without_adapters=24),
    }
    passes = sum(f.samples * (3 if name.endswith("policy") else 1) for name, f in forwards.items())
    assert passes == 24 * (4 + 3 * 5 + 3 + 1 + 2)
    warm_up = step_of(distillation(settings), step=1)
    assert warm_up == {"rollout": forwards["rollout"], "fake_policy": ForwardCount(6 * 5, 6 * 24)}


def test_an_unguided_teacher_and_the_reward_losses_of_dmd2_are_counted():
    plain = step_of(distillation({"name": "dmd2"}), step=1)
    assert "uncond" not in plain
    grpo_loss = {"name": "dmd2", "reward": {"loss": "flow_grpo"}}
    assert step_of(distillation(grpo_loss, reward="color", solver="cps", noise_level=1.0), step=1) == plain
    nft_loss = {"name": "dmd2", "reward": {"loss": "diffusion_nft"}}
    rewarded = step_of(distillation(nft_loss, reward="color"), step=1)
    assert rewarded == plain | {"policy": ForwardCount(10, 48)}


def test_opd_predicts_each_trained_step_with_one_teacher():
    guided = {"weights": "base", "guidance_scale": 4.0}
    one = step_of(distillation({"name": "opd", "teachers": [guided], "num_levels": 2}), step=1)
    assert one == {
        "rollout": ForwardCount(8, 96),
        "policy": ForwardCount(10, 48),
        "teacher_0": ForwardCount(4, 48, without_adapters=48),
        "uncond": ForwardCount(4, 48, without_adapters=48),
    }
    two = [guided | {"when": {"task": "a"}}, {"weights": "loras/b", "when": {"task": "b"}}]
    counts = step_of(distillation({"name": "opd", "teachers": two}), step=1)
    assert (counts["teacher_0"].samples, counts["teacher_0"].without_adapters) == (12, 12)
    assert (counts["teacher_1"].samples, counts["teacher_1"].without_adapters) == (12, 0)
    assert counts["uncond"].samples == 12


def test_sft_and_evaluations():
    recipe = recipe_of(
        data="paired",
        engine={"micro_batch_size": 4, "gradient_accumulation": 3, "max_forward_batch": 5},
        sampling={"height": 32, "width": 32, "eval_steps": 7, "guidance_scale": 2},
        algorithm={"name": "sft"},
        validation={"num_prompts": 6, "seeds": [1, 2]},
    )
    assert count_sft_step(recipe, derive_run_sizes(recipe, 2)) == {"policy": ForwardCount(3, 12)}
    # Two ranks: 6 samples each in batches of 5 and 1, 7 guided steps; 3 images at 8 levels, 12 per rank in 5, 5, 2.
    assert count_evaluation(recipe, 2, num_prompts=9, num_images=3) == {
        "validation": ForwardCount(2 * 14 + 3, 6 * 14 + 12)
    }
    assert count_evaluation(recipe, 2, num_prompts=1) == {"validation": ForwardCount(14, 14)}
    few = Recipe.model_validate({**recipe.model_dump(mode="json"), "logging": {"num_samples": 3}})
    assert count_evaluation(few, 2, num_prompts=9) == {
        "validation": ForwardCount(14, 2 * 14)
    }  # only logged samples are generated


def test_dpo_runs_policy_and_reference_on_both_media_of_each_pair():
    recipe = recipe_of(
        data="pairs",
        engine={"micro_batch_size": 4, "gradient_accumulation": 3, "max_forward_batch": 5},
        sampling={"height": 32, "width": 32, "eval_steps": 7},
        algorithm={"name": "dpo"},
        validation={"num_prompts": 1},
    )
    trained = count_sft_step(recipe, derive_run_sizes(recipe, 2))
    assert trained == {"policy": ForwardCount(3, 24), "ref": ForwardCount(3, 24, without_adapters=24)}
    # Two ranks: 3 pairs at 8 levels, 12 per rank. A pair takes two rows, so 5 rows hold two pairs.
    held_out = ForwardCount(7 + 2 * 6, 7 + 2 * 24, without_adapters=24)
    assert count_evaluation(recipe, 2, num_prompts=1, num_images=3) == {"validation": held_out}


def test_sums_omit_purposes_without_forwards():
    parts = {"a": ForwardCount(6, 10), "b": ForwardCount(0, 0)}, {"a": ForwardCount(1, 2, 2)}
    assert sum_forwards(*parts) == {"a": ForwardCount(7, 12, 2)}
    assert sum_forwards() == {}
