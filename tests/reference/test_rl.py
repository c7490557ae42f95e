"""Full RL runs compared with plain PyTorch: rewards, loss and gradient norm of every update, and all final weights."""

import pytest

from multi_rank.resuming import tiny_recipe
from reference import rl
from reference.comparison import assert_no_equal_policies, assert_same_run
from reference.networks import Network, as_overrides
from reference.product import train_and_keep
from reference.test_supervised import image_samples, write_images

COMMON = {
    "run.steps": 3,
    "run.seed": 11,
    "optimizer.lr": 1e-2,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.05,
    "optimizer.warmup_steps": 2,
    "optimizer.schedule": "linear",
    "optimizer.final_lr_fraction": 0.3,
    "ema": {"decay": 0.3},
    "lora": {"rank": 4, "alpha": 8},
    "engine.micro_batch_size": 3,
    "engine.max_forward_batch": 5,
    "sampling.height": 32,
    "sampling.width": 32,
    "sampling.steps": 4,
    "sampling.eval_steps": 1,
    "sampling.guidance_scale": 2.5,
    "sampling.solver": "ode",
    "rollout.prompts_per_step": 3,
    "rollout.group_size": 4,
    "reward.functions": [{"name": "jpeg_compressibility"}],  # replaced by product.HostRewards
    "reward.max_failed_fraction": 1.0,
    "algorithm.advantage_std": "global",
    "algorithm.adv_clip_max": 1.0,
    "validation.at_start": False,
    "validation.num_prompts": 1,
    "logging.num_samples": 1,
    "logging.console": False,
}
NFT = {
    "algorithm.name": "diffusion_nft",
    "algorithm.beta": 0.5,
    "algorithm.kl_beta": 0.3,
    "algorithm.timestep_fraction": 0.99,
    "algorithm.num_levels": 2,
    "algorithm.updates_per_rollout": 2,
    "algorithm.old_decay": {"initial": 0.2, "slope": 0.1, "max": 0.9},
    "engine.max_grad_norm": 0.015,
}
AWM = {
    "algorithm.name": "awm",
    "algorithm.num_levels": 2,
    "algorithm.updates_per_rollout": 2,
    "algorithm.clip_ratio": 3e-4,
    "algorithm.adv_max": 1.5,
    "algorithm.power": 0.25,
    "algorithm.weighting": "ghuber",
    "algorithm.kl_beta": 0.2,
    "algorithm.ema_kl_beta": 0.5,
    "engine.max_grad_norm": 0.015,
}
GRPO = {
    "algorithm.name": "flow_grpo",
    "sampling.solver": "flow_sde",
    "sampling.noise_level": 0.7,
    "algorithm.clip_ratio_low": 1e-4,
    "algorithm.clip_ratio": 5e-5,  # limit above 1
    "algorithm.kl_beta": 0.5,
    "algorithm.kl_type": "flow_grpo",
    "algorithm.updates_per_rollout": 2,
    "algorithm.timestep_fraction": 0.7,
    "engine.max_grad_norm": 0.005,
}
EXPERTS = NFT | {
    "algorithm.updates_per_rollout": 1,
    "algorithm.num_levels": 3,
    "sampling.num_frames": 5,
    "sampling.steps": 6,
    "sampling.guidance_scale_low": 1.7,
    "sampling.negative_prompt": "",
    "rollout.group_size": 2,
}
DDRL = {
    "run.steps": 5,  # in steps 2 and 4 the rollouts use older weights
    "algorithm.name": "ddrl",
    "sampling.guidance_scale": 1.0,
    "sampling.solver": "edm_2ab",
    "sampling.steps": 5,
    "sampling.s_churn": 1.0,
    "sampling.height": 16,
    "sampling.width": 16,
    "rollout.policy": "reference",
    "algorithm.train_on": [0, 1, 2],
    "algorithm.ratio_norm": "std_scaled",
    "algorithm.clip_ratio": 1e-4,
    "algorithm.kl_beta": 0.2,
    "algorithm.data_beta": 0.1,
    "algorithm.loss_scale": 3.0,
    "algorithm.update_ref_every": 2,
    "engine.max_grad_norm": 0.036,
}
PROMPTS = ("a red square on black", "a blue circle on white", "a green triangle", "a red circle", "one star")


def train_both(name, reference, options, ranks, pipeline, tmp_path):
    """Train the run and its reference. Return the reference and its metrics."""
    options = COMMON | options
    network, folder = Network(pipeline, options), tmp_path / "data"
    if name == "sd3_ddrl":
        samples = image_samples(network, write_images(folder))
        folder, inputs = folder / "images", ([text for _, text, _ in samples], options, [x for _, _, [x] in samples])
    else:
        folder.mkdir()
        (folder / "train.txt").write_text("\n".join(PROMPTS) + "\n")
        inputs = PROMPTS, options
    ranks.run(train_and_keep, **tiny_recipe(name, tmp_path / "run", pipeline, *as_overrides(options), data=folder))
    trained = reference(network, *inputs)
    return trained, trained.train()


def assert_same(trained, expected, tmp_path, *policies, **tolerance):
    assert_no_equal_policies(trained.optimization, *policies)
    assert_same_run(tmp_path / "run", trained.network, trained.optimization, expected, policies, **tolerance)


def assert_clips(expected):
    """Check that some but not all ratios are clipped on each side, and some but not all gradients."""
    for side in ("higher", "lower"):
        assert 0 < sum(line[f"policy/clip_fraction_{side}"] for line in expected) < len(expected) / 2
    assert {line["optim/clipped"] for line in expected} == {0.0, 1.0}


@pytest.mark.unit
def test_nft_on_two_ranks_is_plain_pytorch(two_ranks, tiny_pipelines, tmp_path):
    """In step 2, only the first rank has failed samples: the denominator must count both ranks."""
    trained, expected = train_both("sd3_nft", rl.NftReference, NFT, two_ranks, tiny_pipelines("sd3"), tmp_path)
    first_updates = [line for line in expected if "rollout/samples" in line]
    assert [line["rollout/samples"] for line in first_updates] == [12.0, 10.0, 12.0]
    assert all(0 < line["adv/clip_fraction"] < 1 for line in first_updates)
    assert_same(trained, expected, tmp_path, "train", "old", "ema")


def test_nft_of_two_experts_is_plain_pytorch(one_rank, tiny_pipelines, tmp_path):
    pipeline = tiny_pipelines("wan22")
    trained, expected = train_both("wan_nft", rl.NftReference, EXPERTS, one_rank, pipeline, tmp_path)
    assert_same(trained, expected, tmp_path, "train", "old", "ema")


def test_awm_is_plain_pytorch(one_rank, tiny_pipelines, tmp_path):
    trained, expected = train_both("sd3_awm", rl.AwmReference, AWM, one_rank, tiny_pipelines("sd3"), tmp_path)
    assert_clips(expected)
    assert_same(trained, expected, tmp_path, "train", "ema")


def test_flow_grpo_is_plain_pytorch(one_rank, tiny_pipelines, tmp_path):
    pipeline = tiny_pipelines("sd3")
    trained, expected = train_both("sd3_flow_grpo", rl.FlowGrpoReference, GRPO, one_rank, pipeline, tmp_path)
    assert_clips(expected)
    assert_same(trained, expected, tmp_path, "train", "ema", absolute=6e-5)


def test_ddrl_is_plain_pytorch(one_rank, tiny_pipelines, tmp_path):
    trained, expected = train_both("sd3_ddrl", rl.DdrlReference, DDRL, one_rank, tiny_pipelines("sd3"), tmp_path)
    assert_clips(expected)
    assert_same(trained, expected, tmp_path, "train", "old", "ema")
