"""The denoise loop does not synchronize with the device, and all rollout options give the same samples."""

import pytest

RECIPES = ("sd3_nft", "sd3_flow_grpo")
QUIET = ["sampling.height=32", "sampling.width=32", "model.max_sequence_length=16"]


def samples(recipe, overrides, strict=False):
    """Return the clean latents of one step's samples with random LoRA weights.

    With `strict`, synchronizing with the device in the denoise loop is an error.
    """
    from pathlib import Path

    import torch

    from benchmarks.gpu import runs

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with runs.open_run(Path(recipe), overrides) as run:
        loop = run.loop
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in loop.job.engine.module.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        if strict:
            plan = loop.algorithm.plan
            loop.algorithm.plan = lambda step: Watched(plan(step))
        rollouts = loop.source.collect_rollouts(1)
        loop.source.collect_rewards(rollouts)
        return torch.stack([sample.clean_latents for sample in rollouts.local_rollouts]).cpu()


class Watched:
    """A sampling plan that raises if its loop synchronizes with the device after the first forward starts."""

    def __init__(self, plan):
        self.plan = plan

    def __getattr__(self, name):
        return getattr(self.plan, name)

    def denoise(self, predict, noise, seeds, conditioning_frames=None):
        import torch

        on_cuda = noise.device.type == "cuda"

        def watched(latents, sigma):
            if on_cuda:
                torch.cuda.set_sync_debug_mode("error")
            return predict(latents, sigma)

        try:
            return self.plan.denoise(watched, noise, seeds, conditioning_frames)
        finally:
            if on_cuda:
                torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def sampled(there, root, tiny_pipelines):
    """`sampled(name, *overrides)` returns the samples of the first step of a tiny recipe."""

    def run(name, *overrides, **options):
        words = [f"model.path={tiny_pipelines('sd3')}", *QUIET, *overrides]
        return there(samples, recipe=str(root / "tests" / "recipes" / f"{name}.yaml"), overrides=words, **options)

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits_for_the_device_in_the_denoise_loop(name, sampled):
    found = sampled(name, strict=True)
    assert found.shape == (8, 4, 16, 16)
    assert found.isfinite().all()


def test_a_merged_adapter_samples_the_same(sampled):
    apart, merged = sampled("sd3_nft"), sampled("sd3_nft", "rollout.merge_lora=true")
    assert float((merged - apart).norm() / apart.norm()) < 1e-4


def test_joint_guidance_samples_the_same(sampled):
    guided = "sampling.guidance_scale=3.0"
    apart, joint = sampled("sd3_nft", guided), sampled("sd3_nft", guided, "sampling.guidance_batch=joint")
    assert float((joint - apart).norm() / apart.norm()) < 1e-4


@pytest.mark.parametrize("name", RECIPES)
def test_forwards_from_a_graph_sample_the_same(name, sampled):
    eager, graph = sampled(name), sampled(name, "rollout.cuda_graph=true")
    assert float((graph - eager).norm() / eager.norm()) < 1e-6
