"""Derived views of a recipe, and rules that depend on its algorithm."""

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
EXPLORE = {"group_size": 8, "steps": 4, "regenerate": True}
LOGGED = {"functions": [{"name": "color"}, {"name": "ocr", "weight": 0}]}


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
    sft = Recipe.model_validate(SFT)
    assert not sft.is_rl
    assert sft.supervised_settings is sft.algorithm
    with pytest.raises(TypeError, match="algorithm sft has no rollouts"):
        sft.rl  # noqa: B018


GRPO = {"algorithm": {"name": "flow_grpo"}, "sampling": {**BASE["sampling"], "solver": "flow_sde"}}
DDRL = {"algorithm": {"name": "ddrl"}, "sampling": {**BASE["sampling"], "solver": "edm_2ab"}}
DPO = {"algorithm": {"name": "dpo"}, "data": {"kind": "pairs", "path": "pairs.jsonl"}}
RECOMPUTED = {"algorithm": {"name": "flow_grpo", "old_log_prob": "recompute"}}
REUSE = {"algorithm": {"name": "flow_grpo", "reuse_guidance": True}, "sampling": GRPO["sampling"]}
GUIDED = REUSE | {"sampling": {**GRPO["sampling"], "guidance_scale": 2.0}}
LORA = {"lora": {"rank": 4}}
TE = "transformer_engine"


def model(**keys):
    return {"model": {**BASE["model"], **keys}}


def rollout(**keys):
    return {"rollout": {"group_size": 4, **keys}}


def async_fp8(**keys):
    return LORA | rollout(**{"mode": "async", "base_precision": "fp8", **keys})


@check_each(
    ("base", "changes", "error"),
    [
        # merge_lora needs a LoRA and an algorithm that does not compare log-probabilities.
        (RL, LORA | rollout(merge_lora=True), None),
        (RL, rollout(merge_lora=True), "merge_lora: without a lora section there is nothing to merge: remove"),
        (RL, LORA | GRPO | rollout(merge_lora=True), "merge_lora: algorithm flow_grpo compares log-probabilities of r"),
        # Guidance of the rollout must have run at all trained steps, on this rank.
        (RL, GUIDED, None),
        (RL, REUSE, r"reuse_guidance needs sampling\.guidance_scale above 1: remove one"),
        (RL, GUIDED | rollout(mode="async"), r"reuse_guidance does not support rollout\.mode: async: remove one"),
        (RL, GUIDED | rollout(max_refills=1), r"reuse_guidance does not support rollout\.max_refills"),
        (
            RL,
            GUIDED | {"sampling": {**GUIDED["sampling"], "guidance": {"interval": [0.2, 1.0]}}},
            r"reuse_guidance does not support sampling\.guidance\.interval",
        ),
        # An fp8 base is frozen, and no LoRA can be merged into it.
        (RL, LORA | model(base_precision="fp8"), None),
        (RL, model(base_precision="fp8"), "fp8 is only for a frozen base: add a lora section"),
        (RL, LORA | model(base_precision="fp8") | rollout(merge_lora=True), "cannot be merged into a base in fp8"),
        # fp8_training needs full training; one scale per tensor needs an algorithm that does not compare predictions.
        (RL, model(fp8_training="torchao"), None),
        (RL, LORA | model(fp8_training="torchao"), "fp8_training is for training all weights: remove the lora section"),
        (RL, model(fp8_training=TE), r"algorithm diffusion_nft compares predictions .* torchao"),
        (SFT, model(fp8_training=TE), None),
        (SFT, model(fp8_training=TE) | DPO, "algorithm dpo compares predictions"),
        (SFT, model(fp8_training=TE) | {"engine": {"compile": True}}, r"cannot compile: remove engine\.compile"),
        # Workers may store the base in another format if their log-probabilities are not compared.
        (RL, async_fp8(), None),
        (RL, async_fp8(mode="colocated"), r"colocated does not read rollout\.base_precision"),
        (RL, async_fp8() | {"lora": None}, r"rollout\.base_precision: fp8 is only for a frozen base"),
        (RL, async_fp8(merge_lora=True), "adapters cannot be merged into a base in fp8"),
        (RL, async_fp8(base_precision="fp8_twice"), "fp8_twice is for backward passes"),
        (RL, async_fp8() | GRPO, r"rollout\.base_precision: algorithm flow_grpo compares log-probabilities"),
        (RL, async_fp8() | GRPO | RECOMPUTED, r"rollout\.base_precision: algorithm flow_grpo compares log-prob"),
        (RL, async_fp8(max_staleness=0) | GRPO | RECOMPUTED, None),
        (RL, async_fp8() | GRPO | model(base_precision="fp8"), None),  # the same base, so equal log-probabilities
        # CUDA graphs do not record forward passes that communicate.
        (RL, rollout(cuda_graph=True), None),
        (RL, rollout(cuda_graph=True) | {"engine": {"sequence_parallel": 2}}, "graph cannot contain the communication"),
        (RL, rollout(cuda_graph=True, mode="async") | {"engine": {"sequence_parallel": 2}}, None),
        # Kept attention outputs need eager blocks.
        (SFT, model(gradient_checkpointing="attention"), None),
        (
            SFT,
            model(gradient_checkpointing="attention") | {"engine": {"compile": True}},
            "gradient_checkpointing: attention does not see attention inside compiled blocks: set it to true, or",
        ),
        (SFT, model(gradient_checkpointing="mlp"), "gradient_checkpointing"),
        # Refills need prompts and colocated rollouts.
        (RL, rollout(max_refills=2) | DDRL, None),
        (RL, rollout(max_refills=2, mode="async"), "rollout.max_refills is only for colocated rollouts"),
        (
            *(RL, rollout(max_refills=2) | DDRL | {"data": {"kind": "paired", "path": "p"}}),
            "max_refills is only for data.kind: prompts",
        ),
        (SFT, {"sampling": {**BASE["sampling"], "explore": EXPLORE}}, "does not read sampling.explore: remove it"),
        # A held-out reward must not be a training reward.
        (
            RL,
            {"validation": {"held_out_rewards": ["color/two"]}},
            "color/two is not held out: remove it from one of them",
        ),
        (
            *(RL, {"reward": LOGGED, "validation": {"held_out_rewards": ["ocr"]}}),
            "ocr is also in reward.functions, with",
        ),
        (RL, {"validation": {"held_out_rewards": ["ocr", "ocr"]}}, "each may be listed only once"),
    ],
)
def test_sections_fit_or_are_refused(base, changes, error):
    if error is None:
        Recipe.model_validate(base | changes)
    else:
        with pytest.raises(ValueError, match=error):
            Recipe.model_validate(base | changes)


def test_precision_of_rollouts():
    assert Recipe.model_validate(RL | async_fp8()).rollout_precision == "fp8"
    assert Recipe.model_validate(RL | LORA).rollout_precision is None
    twice = Recipe.model_validate(RL | LORA | model(base_precision="fp8_twice"))
    assert twice.rollout_precision == "fp8"  # with the same predictions


def test_joint_guidance_needs_rollouts_without_compared_log_probs():
    sampling = {**BASE["sampling"], "guidance_scale": 2.0, "guidance_batch": "joint"}
    engine = {"max_forward_batch": 6}
    nft = Recipe.model_validate({**RL, "sampling": sampling, "engine": engine})
    assert nft.joint_guidance_batches == {"validation": 6, "rollout": 6}
    grpo = Recipe.model_validate({**RL, **GRPO, "sampling": {**sampling, "solver": "flow_sde"}, "engine": engine})
    assert grpo.joint_guidance_batches == {"validation": 6}
    sft = Recipe.model_validate({**SFT, "sampling": sampling, "engine": engine})
    assert sft.joint_guidance_batches == {"validation": 6}
    separate = Recipe.model_validate({**RL, "sampling": {**sampling, "guidance_batch": "separate"}})
    assert separate.joint_guidance_batches == {}
    with pytest.raises(ValueError, match="guidance_batch: joint needs a guidance_scale above 1"):
        Recipe.model_validate({**RL, "sampling": {**sampling, "guidance_scale": 1.0}})


def exploring(changes=None, sampling=None, **explore):
    """Return a recipe with candidates; `changes` replaces sections."""
    sampling = {**BASE["sampling"], "explore": {**EXPLORE, **explore}, **(sampling or {})}
    return Recipe.model_validate({**RL, "sampling": sampling, **(changes or {})})


def test_candidates_are_for_rollouts_that_can_be_chosen_from():
    assert exploring(regenerate=False).selects_samples
    assert exploring(
        GRPO | {"sampling": {**BASE["sampling"], "solver": "flow_sde", "explore": EXPLORE}}
    ).selects_samples
    assert Recipe.model_validate(RL | rollout(max_refills=2)).selects_samples
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


def test_held_out_rewards_are_defined_like_rewards():
    held_out = ["ocr", {"name": "digits", "workers": 2}]
    recipe = Recipe.model_validate({**RL, "validation": {"held_out_rewards": held_out}})
    assert [f.name for f in recipe.held_out_reward_settings.functions] == ["ocr", "digits"]
    assert [f.name for f in recipe.all_reward_settings.functions] == ["color", "ocr", "digits"]
    assert [f.name for f in recipe.rl.reward.functions] == ["color"]
    supervised = Recipe.model_validate({**SFT, "validation": {"held_out_rewards": ["ocr"]}})
    assert supervised.all_reward_settings.functions == supervised.held_out_reward_settings.functions
    assert Recipe.model_validate(SFT).all_reward_settings is None
