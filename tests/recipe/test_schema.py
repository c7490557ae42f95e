"""What a recipe says of itself: its views and what its algorithm states."""

import re

import pytest

from each_case import check_each
from wfm_ds.recipe.schema import Recipe

BASE = {
    "run": {"output_dir": "out", "steps": 3},
    "model": {"path": "tiny:sd3"},
    "sampling": {"height": 32, "width": 32},
}
RL = {
    **BASE,
    "data": {"kind": "prompts", "path": "p"},
    "algorithm": {"name": "diffusion_nft"},
    "rollout": {"group_size": 4},
    "reward": {"functions": [{"name": "color"}]},
}
SFT = {**BASE, "data": {"kind": "paired", "path": "p"}, "algorithm": {"name": "sft"}}


def test_the_view_of_reinforcement_learning_holds_its_three_sections():
    recipe = Recipe.model_validate(RL)
    assert recipe.is_rl
    assert recipe.rl.algorithm is recipe.algorithm
    assert recipe.rl.rollout is recipe.rollout
    assert recipe.rl.reward is recipe.reward
    with pytest.raises(AttributeError):
        recipe.rl.rollout = None
    with pytest.raises(TypeError, match="diffusion_nft is not supervised"):
        recipe.supervised_settings  # noqa: B018


MERGED = {**RL, "lora": {"rank": 4}, "rollout": {"group_size": 4, "merge_lora": True}}
GRPO = {"algorithm": {"name": "flow_grpo"}, "sampling": {**BASE["sampling"], "solver": "flow_sde"}}


def test_a_lora_is_merged_where_there_is_one_and_nobody_compares_log_probabilities():
    assert Recipe.model_validate(MERGED).rl.rollout.merge_lora
    with pytest.raises(ValueError, match="merge_lora: without a lora section there is nothing to merge: remove"):
        Recipe.model_validate({**MERGED, "lora": None})
    with pytest.raises(ValueError, match="merge_lora: algorithm flow_grpo compares log-probabilities of rollouts"):
        Recipe.model_validate({**MERGED, **GRPO})


def test_a_base_in_float8_is_one_that_does_not_train_and_is_not_merged_into():
    of_fp8 = {**RL, "model": {**RL["model"], "base_precision": "fp8"}}
    with pytest.raises(ValueError, match="fp8 is only for a frozen base: add a lora section"):
        Recipe.model_validate(of_fp8)
    assert Recipe.model_validate({**of_fp8, "lora": {"rank": 4}}).model.base_precision == "fp8"
    with pytest.raises(ValueError, match="adapters cannot be merged into a base in fp8"):
        Recipe.model_validate({**MERGED, "model": of_fp8["model"]})


def test_products_in_float8_are_for_training_all_weights():
    of_fp8 = {**RL, "model": {**RL["model"], "fp8_training": "torchao"}}
    assert Recipe.model_validate(of_fp8).model.fp8_training == "torchao"
    with pytest.raises(ValueError, match=r"fp8_training is for training all weights: remove the lora section, or set"):
        Recipe.model_validate({**of_fp8, "lora": {"rank": 4}})


def test_one_scale_a_tensor_is_for_algorithms_that_compare_no_predictions():
    of_te = {"fp8_training": "transformer_engine"}
    with pytest.raises(
        ValueError, match=r"transformer_engine: algorithm diffusion_nft compares predictions .* torchao"
    ):
        Recipe.model_validate({**RL, "model": {**RL["model"], **of_te}})
    sft = {**SFT, "model": {**SFT["model"], **of_te}}
    assert Recipe.model_validate(sft).model.fp8_training == "transformer_engine"
    with pytest.raises(ValueError, match=r"algorithm dpo compares predictions"):
        Recipe.model_validate({**sft, "algorithm": {"name": "dpo"}, "data": {"kind": "pairs", "path": "pairs.jsonl"}})
    with pytest.raises(ValueError, match=r"layers that torch cannot compile: remove engine\.compile"):
        Recipe.model_validate({**sft, "engine": {**sft.get("engine", {}), "compile": True}})


def test_workers_may_keep_the_base_otherwise_where_nobody_reads_their_log_probabilities():
    def of(**keys):
        changed = {**RL, "lora": {"rank": 4}, **keys}
        rollout = {"group_size": 4, "mode": "async", "base_precision": "fp8", **keys.get("rollout", {})}
        return Recipe.model_validate({**changed, "rollout": rollout})

    assert of().rollout_precision == "fp8"
    assert of().model.base_precision is None
    assert Recipe.model_validate({**RL, "lora": {"rank": 4}}).rollout_precision is None
    with pytest.raises(ValueError, match=r"colocated does not read rollout\.base_precision"):
        of(rollout={"mode": "colocated"})
    with pytest.raises(ValueError, match=r"rollout\.base_precision: fp8 is only for a frozen base"):
        of(lora=None)
    with pytest.raises(ValueError, match="adapters cannot be merged into a base in fp8"):
        of(rollout={"merge_lora": True})
    refused = r"rollout\.base_precision: algorithm flow_grpo compares log-probabilities"
    for keys in ({}, {"old_log_prob": "rollout"}, {"old_log_prob": "recompute"}):
        with pytest.raises(ValueError, match=refused):
            of(**GRPO | {"algorithm": {"name": "flow_grpo", **keys}})
    twice = {**RL["model"], "base_precision": "fp8_twice"}
    trained = Recipe.model_validate({**RL, "lora": {"rank": 4}, "model": twice})
    assert trained.rollout_precision == "fp8"  # the same predictions
    with pytest.raises(ValueError, match="fp8_twice is for backward passes"):
        of(rollout={"base_precision": "fp8_twice"})
    recomputed = GRPO | {"algorithm": {"name": "flow_grpo", "old_log_prob": "recompute"}}
    assert of(**recomputed, rollout={"max_staleness": 0}).rollout_precision == "fp8"
    everywhere = {**RL["model"], "base_precision": "fp8"}
    assert of(**GRPO, model=everywhere).rollout_precision == "fp8"  # one base: log-probabilities are the same


def test_forwards_that_exchange_are_not_recorded():
    graphs = {**RL, "rollout": {"group_size": 4, "cuda_graph": True}}
    shared = {"engine": {"sequence_parallel": 2}}
    assert Recipe.model_validate(graphs).rl.rollout.cuda_graph
    with pytest.raises(ValueError, match="cuda_graph: a graph cannot contain the communication between the ranks"):
        Recipe.model_validate({**graphs, **shared})
    alone = {"rollout": {"group_size": 4, "cuda_graph": True, "mode": "async"}}
    assert Recipe.model_validate({**graphs, **shared, **alone}).is_async


def test_joint_guidance_is_for_what_nobody_compares():
    sampling = {**BASE["sampling"], "guidance_scale": 2.0, "guidance_batch": "joint"}
    engine = {"max_forward_batch": 6}
    nft = Recipe.model_validate({**RL, "sampling": sampling, "engine": engine})
    assert nft.joint_guidance_batches == {"validation": 6, "rollout": 6}
    grpo = Recipe.model_validate({**RL, **GRPO, "sampling": {**sampling, "solver": "flow_sde"}, "engine": engine})
    assert grpo.joint_guidance_batches == {"validation": 6}
    assert Recipe.model_validate({**SFT, "sampling": sampling, "engine": engine}).joint_guidance_batches == {
        "validation": 6
    }
    assert (
        Recipe.model_validate({**RL, "sampling": {**sampling, "guidance_batch": "separate"}}).joint_guidance_batches
        == {}
    )
    with pytest.raises(ValueError, match="guidance_batch: joint needs a guidance_scale above 1"):
        Recipe.model_validate({**RL, "sampling": {**sampling, "guidance_scale": 1.0}})


EXPLORE = {"group_size": 8, "steps": 4, "regenerate": True}


def exploring(changes=None, sampling=None, **explore):
    """A recipe with candidates; `changes` of its sections."""
    sampling = {**BASE["sampling"], "explore": {**EXPLORE, **explore}, **(sampling or {})}
    return Recipe.model_validate({**RL, "sampling": sampling, **(changes or {})})


def test_candidates_are_for_rollouts_that_can_be_chosen_from():
    assert exploring(regenerate=False).selects_samples
    assert exploring(
        GRPO | {"sampling": {**BASE["sampling"], "solver": "flow_sde", "explore": EXPLORE}}
    ).selects_samples
    assert not Recipe.model_validate(RL).selects_samples


@check_each(
    ("changes", "sampling", "explore", "said"),
    [
        ({}, {}, {"steps": 11}, "explore.steps 11 is more than steps 10"),
        ({}, {"same_noise": True, "solver": "cps"}, {}, "remove same_noise or explore"),
        ({}, {}, {"group_size": 3}, "group_size 3 is less than rollout.group_size 4"),
        ({"rollout": {"group_size": 3}}, {}, {}, "make rollout.group_size 3 even"),
        ({"rollout": {"group_size": 4, "mode": "async"}}, {}, {}, "sampling.explore is only for colocated rollouts"),
        ({"algorithm": {"name": "ddrl"}}, {"solver": "edm_2ab"}, {}, "explore is not supported by the EDM solvers"),
        (GRPO, {"solver": "flow_sde"}, {"regenerate": False}, "flow_grpo trains on denoising steps"),
    ],
)
def test_candidates_that_cannot_be_are_refused(changes, sampling, explore, said):
    changes = {section: value for section, value in changes.items() if section != "sampling"}
    with pytest.raises(ValueError, match=re.escape(said)):
        exploring(changes, sampling, **explore)


def test_supervised_fine_tuning_does_not_explore():
    with pytest.raises(ValueError, match=re.escape("does not read sampling.explore: remove it")):
        Recipe.model_validate({**SFT, "sampling": {**BASE["sampling"], "explore": EXPLORE}})


def test_refills_are_for_prompts_and_colocated_rollouts():
    refilled = {**RL, "rollout": {"group_size": 4, "max_refills": 2}}
    assert Recipe.model_validate(refilled).selects_samples
    with pytest.raises(ValueError, match=re.escape("rollout.max_refills is only for colocated rollouts")):
        Recipe.model_validate({**RL, "rollout": {"group_size": 4, "max_refills": 2, "mode": "async"}})
    ddrl = {"algorithm": {"name": "ddrl"}, "sampling": {**BASE["sampling"], "solver": "edm_2ab"}}
    assert Recipe.model_validate({**refilled, **ddrl}).selects_samples
    with pytest.raises(ValueError, match=re.escape("rollout.max_refills is only for data.kind: prompts, not paired")):
        Recipe.model_validate({**refilled, **ddrl, "data": {"kind": "paired", "path": "p"}})


def test_supervised_fine_tuning_has_no_such_view():
    recipe = Recipe.model_validate(SFT)
    assert not recipe.is_rl
    assert recipe.supervised_settings is recipe.algorithm
    with pytest.raises(TypeError, match="sft has neither rollouts nor rewards"):
        recipe.rl  # noqa: B018


def test_a_judge_is_held_out_and_asked_as_the_rewards_are():
    held_out = ["ocr", {"name": "digits", "workers": 2}]
    recipe = Recipe.model_validate({**RL, "validation": {"held_out_rewards": held_out}})
    assert [f.name for f in recipe.held_out_reward_settings.functions] == ["ocr", "digits"]
    assert [f.name for f in recipe.all_reward_settings.functions] == ["color", "ocr", "digits"]
    assert [f.name for f in recipe.rl.reward.functions] == ["color"]
    supervised = Recipe.model_validate({**SFT, "validation": {"held_out_rewards": ["ocr"]}})
    assert supervised.all_reward_settings.functions == supervised.held_out_reward_settings.functions
    assert Recipe.model_validate(SFT).all_reward_settings is None
    with pytest.raises(ValueError, match=r"color/two is not held out, reward.functions trains on it"):
        Recipe.model_validate({**RL, "validation": {"held_out_rewards": ["color/two"]}})
    logged = {"functions": [{"name": "color"}, {"name": "ocr", "weight": 0}]}
    with pytest.raises(ValueError, match=r"ocr is also in reward.functions, with weight 0: remove it there"):
        Recipe.model_validate({**RL, "reward": logged, "validation": {"held_out_rewards": ["ocr"]}})
    with pytest.raises(ValueError, match="each may be listed only once"):
        Recipe.model_validate({**RL, "validation": {"held_out_rewards": ["ocr", "ocr"]}})
