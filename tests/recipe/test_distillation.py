"""Rules for recipes of the distillation algorithms: required sections, refused keys, defaults."""

import pytest
from pydantic import ValidationError

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.deepspeed import build_deepspeed_config
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe

OPD = {"name": "opd", "teachers": [{"guidance_scale": 4.0}]}
DMD2 = {"name": "dmd2", "fake": {"updates": 3, "warmup_steps": 2}}
REWARDED = {**DMD2, "reward": {"loss": "flow_grpo"}}
REWARD = {"functions": [{"name": "color"}]}
RENOISE = {"solver": "cps", "noise_level": 1.0}


def validate(algorithm, **sections):
    """Validate a recipe. `sections` are merged into it; None removes a section."""
    recipe = {
        "run": {"output_dir": "out", "steps": 5},
        "model": {"path": "tiny:sd3"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"kind": "prompts", "path": "p"},
        "sampling": {"height": 32, "width": 32, "steps": 4},
        "algorithm": algorithm,
        "rollout": {"prompts_per_step": 4, "group_size": 2},
    }
    for name, keys in sections.items():
        recipe[name] = {**recipe.get(name, {}), **keys} if isinstance(keys, dict) else keys
    recipe["sampling"].setdefault("eval_steps", recipe["sampling"]["steps"])
    return Recipe.model_validate({name: keys for name, keys in recipe.items() if keys is not None})


def error_of(algorithm, **sections):
    with pytest.raises(ValidationError) as caught:
        validate(algorithm, **sections)
    (error,) = caught.value.errors()
    return error["msg"].removeprefix("Value error, ")


@check_each("algorithm", [OPD, DMD2])
def test_no_rewards_are_needed_and_the_student_samples_without_guidance(algorithm):
    recipe = validate(algorithm, rollout={"group_size": 1})
    assert recipe.is_rl
    assert not recipe.uses_rewards
    assert recipe.all_reward_settings is None
    assert recipe.sampling.guidance_scale == 1
    with pytest.raises(TypeError, match="uses no rewards"):
        recipe.rl.reward  # noqa: B018
    stored = recipe.model_dump(mode="json", exclude_none=True)
    assert Recipe.model_validate(stored) == recipe


def test_only_a_guided_teacher_needs_negative_prompts():
    assert validate(OPD).uses_guidance
    assert not validate(DMD2).uses_guidance
    assert validate({**DMD2, "teacher": {"guidance_scale": 2}}).uses_guidance


def test_each_rl_step_trains_the_fake_score_and_then_the_student():
    sizes = derive_run_sizes(validate(DMD2), 2)
    assert (sizes.updates_per_step, sizes.total_updates, sizes.terms_per_rank) == (4, 3, 4)
    assert "3 (1 per step, after 3 of the fake score)" in sizes.summary_lines()[-1]
    assert derive_run_sizes(validate({**OPD, "num_levels": 3, "updates_per_rollout": 2}), 2).terms_per_rank == 6


@check_each(
    "algorithm, sections, words",
    [
        ({"name": "opd"}, {}, "Field required"),
        ({**OPD, "teachers": [{}]}, {}, "starts with the weights of its teacher (base) and learns nothing"),
        ({**OPD, "teachers": [{"weights": "init"}]}, {"lora": {"init_from": "x"}}, "of its teacher (init)"),
        ({**OPD, "teachers": [{"weights": "init", "guidance_scale": 2}]}, {}, "set lora.init_from"),
        ({**OPD, "teachers": [{"guidance_scale": 2}] * 2}, {}, "each needs `when`"),
        ({**OPD, "teachers": [{"guidance_scale": 0.5}]}, {}, "greater than or equal to 1"),
        (
            {**OPD, "teachers": [{"guidance_scale": 2, "when": {"a": 1}}], "max_num_conditional_frames": 1},
            {"data": {"kind": "paired"}},
            "`when` reads the metadata of prompts, but data.kind is paired",
        ),
        ({**OPD, "weighting": "kl"}, {}, "algorithm.weighting: kl needs a stochastic solver, sampling.solver ode adds"),
        ({**OPD, "weighting": "kl", "num_levels": 4}, {"sampling": RENOISE}, "the number of noisy steps 3: lower it"),
        ({**OPD, "num_levels": 5}, {}, "algorithm.num_levels 5 is more than sampling.steps 4: lower it"),
        ({**DMD2, "teacher": {"weights": "init"}}, {}, "weights: init: set lora.init_from"),
        ({**DMD2, "fake": {"warmup_steps": 5}}, {}, "leaves none of run.steps 5 for the student: lower it"),
        ({**DMD2, "levels": {"min": 0.5, "max": 0.5}}, {}, "min 0.5 must be below max 0.5"),
        ({**DMD2, "adv_clip_max": 2.0}, {}, "Extra inputs are not permitted"),
        (DMD2, {"lora": None}, "algorithm dmd2 trains only a LoRA: add the section lora"),
        (OPD, {"lora": None}, "algorithm opd trains only a LoRA: add the section lora"),
        (DMD2, {"lora": {"dropout": 0.1}}, "lora.dropout: algorithm dmd2"),
        (DMD2, {"sampling": {"guidance_scale": 4.5}}, "sampling.guidance_scale 4.5: the student of dmd2 needs no"),
        (
            {**DMD2, "max_num_conditional_frames": 1},
            {
                "data": {"kind": "paired"},
                "sampling": {**RENOISE, "eval_solver": "cps", "grid": "even", "eval_grid": "even"},
            },
            "sampling.eval_solver: cps does not work with conditioning frames: set it to ode, or remove",
        ),
        (DMD2, {"sampling": {"eval_steps": 28}}, "eval_steps 28 and eval_grid stock are not those of the student"),
        (DMD2, {"sampling": {"grid": "even"}}, "set eval_steps to 4 and eval_grid to even"),
        (
            REWARDED,
            {"sampling": RENOISE, "reward": REWARD, "rollout": {"merge_lora": True}},
            "rollout.merge_lora rounds the weights, but algorithm.reward.loss: flow_grpo compares",
        ),
        (DMD2, {"sampling": {"solver": "edm_euler"}}, "sampling.solver edm_euler is only for algorithm ddrl"),
        (DMD2, {"sampling": {"explore": {"group_size": 4, "steps": 2}}}, "sampling.explore chooses by reward"),
        (OPD, {"rollout": {"max_refills": 1}}, "rollout.max_refills chooses by reward"),
        (OPD, {"data": {"choose": "reward_std"}}, "data.choose: reward_std chooses by reward"),
        (OPD, {"rollout": {"mode": "async"}}, "rollout.mode: async is not supported by algorithm opd"),
        (OPD, {"rollout": {"policy": "current"}}, "rollout.policy is only for algorithm ddrl"),
        (OPD, {"rollout": None}, "algorithm opd needs the section rollout"),
        (OPD, {"reward": REWARD}, "opd does not read the section reward: remove it"),
        (DMD2, {"reward": REWARD}, "reads the section reward only with algorithm.reward: set it, or remove"),
        (DMD2, {"validation": {"rollout_correlation": True}}, "does not read validation.rollout_correlation"),
        (REWARDED, {"sampling": RENOISE}, "algorithm dmd2 needs the section reward"),
        (REWARDED, {"reward": REWARD}, "reward.loss: flow_grpo needs a stochastic solver, sampling.solver ode"),
        (REWARDED, {"reward": REWARD, "sampling": {"steps": 1}}, "but sampling.steps is 1: set loss to diffusion_nft"),
        (REWARDED, {"reward": REWARD, "sampling": RENOISE, "rollout": {"group_size": 1}}, "rollout.group_size 1: adv"),
        ({**DMD2, "reward": {"loss": "flow_grpo", "beta": 0.5}}, {"reward": REWARD}, "read with loss: diffusion_nft"),
        ({**DMD2, "reward": {"loss": "awm"}}, {"reward": REWARD}, "'flow_grpo' or 'diffusion_nft'"),
    ],
)
def test_a_recipe_that_cannot_distill_is_refused_with_one_sentence(algorithm, sections, words):
    message = error_of(algorithm, **sections)
    assert words in message
    assert "\n" not in message


@check_each("algorithm", [OPD, DMD2])
def test_offloaded_optimizers_are_refused(algorithm):
    recipe = validate(algorithm, engine={"deepspeed": "zero3_offload"})
    sizes = {"accumulation": 1, "world_size": 1, "ranks_per_node": 1, "policies": frozenset()}
    with pytest.raises(RecipeError, match=f"{algorithm['name']} does not support offload yet: use zero2"):
        build_deepspeed_config(recipe, **sizes)


@check_each("algorithm", [{"name": "diffusion_nft"}, {"name": "awm"}])
def test_reinforcement_learning_still_needs_two_samples_per_prompt(algorithm):
    words = error_of(algorithm, reward=REWARD, rollout={"group_size": 1})
    assert "advantages compare the samples of a prompt" in words


@check_each("loss, sampling", [("flow_grpo", RENOISE), ("diffusion_nft", {}), ("diffusion_nft", {"steps": 1})])
def test_a_reward_loss_needs_rewards_and_has_its_own_keys_for_advantages(loss, sampling):
    algorithm = {**DMD2, "reward": {"loss": loss, "weight": 5, "advantage_std": "group", "combine": "gdpo"}}
    recipe = validate(algorithm, reward=REWARD, sampling=sampling)
    assert recipe.uses_rewards
    assert recipe.rl.reward is recipe.reward
    assert recipe.algorithm.advantages.advantage_std == "group"
    assert recipe.algorithm.passes_per_term == 1 + (loss == "diffusion_nft")
