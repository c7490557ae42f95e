"""What a recipe is predicted to run, against what runs of it counted: every forward, step by step. More cases ride on
the runs of test_runs.py."""

from pathlib import Path

import pytest

from forward_counts import counted, predicted
from multi_rank.resuming import train_on_rank

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "tests" / "recipes"
COMMON = ["run.steps=3", "logging.console=false", "validation.at_start=false"]
RL = [f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}", "algorithm.zero_std=keep"]
CASES = {
    "nft: lora, kl, guidance, two updates, evaluation": [
        "sd3_nft.yaml",
        "sampling.guidance_scale=2",
        "algorithm.updates_per_rollout=2",
        "engine.micro_batch_size=5",
        "validation.every=2",
        "validation.rollout_correlation=true",
    ],
    "nft: merged adapters, joint guidance where it fits": [
        "sd3_nft.yaml",
        "rollout.merge_lora=true",
        "sampling.guidance_scale=2",
        "sampling.guidance_batch=joint",
        "engine.max_forward_batch=6",  # 6 and 2 samples of a rollout, of which the 2 share
        "validation.every=2",
    ],
    "nft: lora, no kl": ["sd3_nft.yaml", "algorithm.kl_beta=0"],
    "nft: all weights, no kl, copied old policy, two updates": [
        "sd3_nft.yaml",
        "lora=null",
        "algorithm.kl_beta=0",
        "algorithm.old_decay=copy",
        "algorithm.updates_per_rollout=2",
        "engine.max_forward_batch=3",
    ],
    "nft: all weights, kl, a decay that begins after two steps": [
        "sd3_nft.yaml",
        "lora=null",
        "algorithm.old_decay={flat_steps: 3, initial: 0, slope: 0.1, max: 0.5}",
    ],
    "nft: copied old policy, guidance, one update": [
        "sd3_nft.yaml",
        "algorithm.old_decay=copy",
        "sampling.guidance_scale=3",
    ],
    "awm: kl, the average, guidance, two updates": ["sd3_awm.yaml", "sampling.guidance_scale=2"],
    "awm: all weights, nothing to be held to": [
        "sd3_awm.yaml",
        "lora=null",
        "algorithm.kl_beta=0",
        "algorithm.ema_kl_beta=0",
    ],
    "ram: two noise levels": ["sd3_ram.yaml", "engine.micro_batch_size=5"],
    "grpo: kl, guidance, two updates": ["sd3_flow_grpo.yaml", "engine.micro_batch_size=5"],
    "grpo: recomputed probabilities, no guidance, no kl": [
        "sd3_flow_grpo.yaml",
        "algorithm.old_log_prob=recompute",
        "algorithm.kl_beta=0",
        "sampling.guidance_scale=1",
        "engine.micro_batch_size=3",
        "engine.max_forward_batch=7",
    ],
    "grpo: window, all weights, two best and worst": [
        "sd3_flow_grpo.yaml",
        "lora=null",
        "algorithm.updates_per_rollout=1",
        "algorithm.best_of_n=2",
        "sampling.window={kind: random, size: 1, range: [0, 2]}",
    ],
}


DDRL = {
    "ddrl: data": [],
    "ddrl: kl, a reference that rolls out and moves, all weights": [
        "lora=null",
        "algorithm.kl_beta=0.1",
        "algorithm.data_on_first_only=true",
        "algorithm.update_ref_every=2",
        "rollout.policy=reference",
    ],
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    from wfm_ds.demos.digits_data import write_digits

    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder / "images"


@pytest.mark.parametrize("case", CASES)
def test_a_run_does_the_predicted_forwards(case, one_rank, tiny_pipelines, tmp_path):
    recipe, *overrides = CASES[case]
    words = [f"run.output_dir={tmp_path / 'run'}", f"model.path={tiny_pipelines('sd3')}", *COMMON, *RL, *overrides]
    one_rank.run(train_on_rank, recipe=str(RECIPES / recipe), overrides=words)
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1)


@pytest.mark.parametrize("case", DDRL)
def test_ddrl_does_the_predicted_forwards(case, one_rank, tiny_pipelines, digits, tmp_path):
    words = [f"run.output_dir={tmp_path / 'run'}", f"model.path={tiny_pipelines('sd3')}", f"data.path={digits}"]
    one_rank.run(train_on_rank, recipe=str(RECIPES / "sd3_ddrl.yaml"), overrides=[*words, *COMMON, *DDRL[case]])
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1)


def test_sft_does_the_predicted_forwards(one_rank, tiny_pipelines, digits, tmp_path):
    words = [
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={tiny_pipelines('sd3')}",
        f"data.path={digits}",
        "engine.micro_batch_size=3",
        "engine.gradient_accumulation=2",
        "engine.max_forward_batch=6",
        "validation.every=2",
        "validation.num_images=5",
        *COMMON,
    ]
    one_rank.run(train_on_rank, recipe=str(RECIPES / "sd3_sft.yaml"), overrides=words)
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1, num_images=5)
