"""Full distillation runs compared with plain PyTorch: losses, gradient norms and weights of student and fake score."""

import pytest
import torch
from safetensors.torch import save_file

from multi_rank.resuming import tiny_recipe
from reference import distillation
from reference.comparison import assert_same_run
from reference.networks import Network, as_overrides
from reference.product import read_updates, train_and_keep
from reference.test_rl import COMMON, PROMPTS

SHARED = {key: value for key, value in COMMON.items() if not key.startswith(("algorithm.", "reward."))}
SHARED |= {"sampling.guidance_scale": 1.0, "engine.max_grad_norm": 0.015}
REWARD = {"reward.functions": COMMON["reward.functions"], "reward.max_failed_fraction": 1.0}
DMD2 = {
    "run.steps": 4,
    "sampling.eval_steps": 4,
    "algorithm.fake": {"lr": 2e-2, "betas": [0.0, 0.99], "updates": 2, "warmup_steps": 1},
    "algorithm.levels": {"density": "uniform", "min": 0.05, "max": 0.9, "shift": 2.0},
}


def train_both(name, reference, options, ranks, pipeline, folder, **teacher):
    """Train the run and its reference. Return the reference and its metrics."""
    options = SHARED | options
    network = Network(pipeline, options)
    data = folder / "data"
    data.mkdir()
    (data / "train.txt").write_text("\n".join(PROMPTS) + "\n")
    trained = reference(network, PROMPTS, options, **{key: value(network) for key, value in teacher.items()})
    ranks.run(train_and_keep, **tiny_recipe(name, folder / "run", pipeline, *as_overrides(options), data=data))
    return trained, trained.train()


def assert_same(trained, expected, folder, **tolerance):
    assert_same_run(folder / "run", trained.network, trained.optimization, expected, ("train", "ema"), **tolerance)


@pytest.mark.slow
def test_dmd2_with_a_policy_gradient_on_two_ranks_is_plain_pytorch(two_ranks, tiny_pipelines, tmp_path):
    """The teacher is the guided base, the first step is the warm-up, some gradients are clipped."""
    options = DMD2 | REWARD | {"engine.max_grad_norm": 0.018}
    options |= {"algorithm.teacher": {"guidance_scale": 3.0}, "sampling.solver": "cps", "sampling.noise_level": 1.0}
    reward = {"loss": "flow_grpo", "weight": 0.02, "adv_clip_max": 1.0, "advantage_std": "global"}
    options |= {f"algorithm.reward.{key}": value for key, value in reward.items()}
    trained, expected = train_both(
        "sd3_dmd2", distillation.Dmd2Reference, options, two_ranks, tiny_pipelines("sd3"), tmp_path
    )
    assert [("optim/fake_lr" in line) for line in expected] == [True] * 3 + [True, True, False] * 3
    assert {line.get("optim/clipped", line.get("optim/fake_clipped")) for line in expected} == {0.0, 1.0}
    assert_same(trained, expected, tmp_path)
    lines = read_updates(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    # Per sample and student update: N rollout passes, r for the fake score, one each for student and fake, two guided.
    counts = {name: lines[3][f"perf/forward_samples_{name}"] for name in ("rollout", "fake_policy", "policy", "fake")}
    assert counts == {"rollout": 4 * 6, "fake_policy": 2 * 6, "policy": 6, "fake": 6}
    assert lines[3]["perf/forward_samples_teacher"] == lines[3]["perf/forward_samples_uncond"] == 6


def test_dmd2_with_a_teacher_lora_and_diffusion_nft_is_plain_pytorch(one_rank, tiny_pipelines, tmp_path):
    options = DMD2 | REWARD | {"sampling.solver": "ode"}
    reward = {"loss": "diffusion_nft", "weight": 0.3, "beta": 0.5, "adv_clip_max": 1.0, "advantage_std": "group"}
    options |= {f"algorithm.reward.{key}": value for key, value in reward.items()}
    options |= {"algorithm.teacher": {"weights": str(tmp_path / "teacher.safetensors"), "guidance_scale": 1.0}}
    trained, expected = train_both(
        "sd3_dmd2",
        distillation.Dmd2Reference,
        options,
        one_rank,
        tiny_pipelines("sd3"),
        tmp_path,
        teacher_weights=lambda network: write_teacher(network, tmp_path / "teacher.safetensors"),
    )
    assert_same(trained, expected, tmp_path)


def test_opd_of_a_guided_lora_is_plain_pytorch(two_ranks, tiny_pipelines, tmp_path):
    teacher = {"weights": str(tmp_path / "teacher.safetensors"), "guidance_scale": 2.5}
    options = {"algorithm.teachers": [teacher]}
    trained, expected = train_both(
        "sd3_opd",
        distillation.OpdReference,
        options,
        two_ranks,
        tiny_pipelines("sd3"),
        tmp_path,
        teacher_weights=lambda network: write_teacher(network, tmp_path / "teacher.safetensors"),
    )
    assert_same(trained, expected, tmp_path)


def write_teacher(network, file):
    """Write a LoRA of rank 2 with another scale than the run's, and return the equal weights of rank 4."""
    generator, tensors, weights = torch.Generator().manual_seed(7), {}, []
    names = [name for name, _ in network.experts[0].named_parameters() if ".default." in name]
    for name, parameter in zip(names, network.trained, strict=True):
        small = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_a = ".lora_A." in name
        small = (small[:2] if is_a else small[:, :2]).float()
        tensors[f"transformer.{name.replace('.default.', '.')}"] = small.contiguous()
        whole = torch.zeros_like(parameter)
        if is_a:
            whole[:2] = small
        else:
            whole[:, :2] = small.double() * (1.0 / 2) / (8 / 4)  # alpha / rank of the file and of the run
        weights.append(whole.detach())
        if not is_a:
            tensors[f"transformer.{name.replace('.lora_B.default.weight', '.alpha')}"] = torch.tensor(1.0)
    save_file(tensors, file)
    return weights
