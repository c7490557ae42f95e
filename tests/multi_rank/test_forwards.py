"""The predicted forwards of a recipe equal the forwards that its run counted, step by step. test_runs.py checks more
cases."""

import pytest

from forward_counts import counted, predicted
from multi_rank.resuming import records, tiny_recipe, train_on_rank, weights

pytestmark = pytest.mark.slow

COMMON = ["run.steps=3", "logging.console=false", "validation.at_start=false"]
CASES = {
    "nft: lora, kl, guidance, two updates, evaluation": [
        "sd3_nft",
        "sampling.guidance_scale=2",
        "algorithm.updates_per_rollout=2",
        "engine.micro_batch_size=5",
        "validation.every=2",
        "validation.rollout_correlation=true",
    ],
    "nft: merged adapters, joint guidance where it fits": [
        "sd3_nft",
        "rollout.merge_lora=true",
        "sampling.guidance_scale=2",
        "sampling.guidance_batch=joint",
        "engine.max_forward_batch=6",  # batches of 6 and 2; only the batch of 2 can be joint
        "validation.every=2",
    ],
    "nft: all weights, no kl, copied old policy, two updates": [
        "sd3_nft",
        "lora=null",
        "algorithm.kl_beta=0",
        "algorithm.old_decay=copy",
        "algorithm.updates_per_rollout=2",
        "engine.max_forward_batch=3",
    ],
    "nft: all weights, kl, a decay that begins after two steps": [
        "sd3_nft",
        "lora=null",
        "algorithm.old_decay={flat_steps: 3, initial: 0, slope: 0.1, max: 0.5}",
    ],
    "awm: kl, the average, guidance, two updates": ["sd3_awm", "sampling.guidance_scale=2"],
    "awm: all weights, nothing to be held to": [
        "sd3_awm",
        "lora=null",
        "algorithm.kl_beta=0",
        "algorithm.ema_kl_beta=0",
    ],
    "ram: two noise levels": ["sd3_ram", "engine.micro_batch_size=5"],
    "grpo: kl, guidance, two updates": ["sd3_flow_grpo", "engine.micro_batch_size=5"],
    "grpo: kl, guidance, two updates, guidance of the rollout": [
        "sd3_flow_grpo",
        "engine.micro_batch_size=5",
        "algorithm.reuse_guidance=true",
    ],
    "grpo: recomputed probabilities, no guidance, no kl": [
        "sd3_flow_grpo",
        "algorithm.old_log_prob=recompute",
        "algorithm.kl_beta=0",
        "sampling.guidance_scale=1",
        "engine.micro_batch_size=3",
        "engine.max_forward_batch=7",
    ],
    "grpo: window, all weights, two best and worst": [
        "sd3_flow_grpo",
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


DISTILLATION = {
    "opd: guided teacher, two levels, two updates": [
        "sd3_opd",
        "algorithm.num_levels=2",
        "algorithm.updates_per_rollout=2",
        "engine.micro_batch_size=3",
        "engine.max_forward_batch=7",
        "validation.every=2",
    ],
    "dmd2: guided teacher, warm-up": [
        "sd3_dmd2",
        "algorithm.fake.warmup_steps=1",
        "engine.micro_batch_size=5",
        "engine.max_forward_batch=5",
        "validation.every=2",
    ],
    "dmd2: reward": [
        "sd3_dmd2",
        "algorithm.teacher.guidance_scale=1",
        "algorithm.reward={loss: diffusion_nft}",
        "reward={functions: [{name: color}]}",
    ],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci_cases(
    "nft: lora, kl, guidance, two updates, evaluation",
    "ram: two noise levels",
    "grpo: kl, guidance, two updates, guidance of the rollout",
    "grpo: window, all weights, two best and worst",
)
def test_a_run_does_the_predicted_forwards(case, one_rank, tiny_pipelines, tmp_path):
    name, *overrides = CASES[case]
    words = [*COMMON, "algorithm.zero_std=keep", *overrides]
    one_rank.run(train_on_rank, **tiny_recipe(name, tmp_path / "run", tiny_pipelines("sd3"), *words))
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1)


@pytest.mark.parametrize("case", DISTILLATION)
def test_distillation_does_the_predicted_forwards(case, one_rank, tiny_pipelines, tmp_path):
    name, *overrides = DISTILLATION[case]
    words = [*COMMON, *overrides]
    one_rank.run(train_on_rank, **tiny_recipe(name, tmp_path / "run", tiny_pipelines("sd3"), *words))
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1)


@pytest.mark.long
def test_guidance_taken_from_the_rollout_gives_the_same_run(one_rank, two_ranks, tiny_pipelines, tmp_path):
    """The batches of rollouts and training have the same size, so both predict the same unconditional velocities."""
    common = ["algorithm.kl_beta=0.1", "engine.micro_batch_size=4", "engine.max_forward_batch=4", "engine.guard=true"]
    for kind, ranks in (("one", one_rank), ("two", two_ranks)):
        for reuse in (False, True):
            words = [*COMMON, *common, f"algorithm.reuse_guidance={str(reuse).lower()}"]
            folder = tmp_path / f"{kind}{reuse}"
            ranks.run(train_on_rank, **tiny_recipe("sd3_flow_grpo", folder, tiny_pipelines("sd3"), *words))
        again, reused = ([{**line} for line in records(tmp_path / f"{kind}{reuse}")] for reuse in (False, True))
        calls = [[line.pop("perf/forwards_uncond", None) for line in lines] for lines in (again, reused)]
        assert all(new < old for old, new in zip(*calls, strict=True) if old is not None)
        assert any(calls[0])
        for lines in (again, reused):
            for line in lines:
                for name in [name for name in line if name.startswith("perf/")]:
                    del line[name]
        assert again == reused
        old, new = (weights(tmp_path / f"{kind}{reuse}", 3) for reuse in (False, True))
        assert old
        assert all(tensor.equal(new[name]) for name, tensor in old.items())


@pytest.mark.parametrize("case", DDRL)
def test_ddrl_does_the_predicted_forwards(case, one_rank, tiny_pipelines, digits, tmp_path):
    words = [*COMMON, *DDRL[case]]
    one_rank.run(train_on_rank, **tiny_recipe("sd3_ddrl", tmp_path / "run", tiny_pipelines("sd3"), *words, data=digits))
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1)


def test_sft_does_the_predicted_forwards(one_rank, tiny_pipelines, digits, tmp_path):
    words = [
        "engine.micro_batch_size=3",
        "engine.gradient_accumulation=2",
        "engine.max_forward_batch=6",
        "validation.every=2",
        "validation.num_images=5",
        *COMMON,
    ]
    one_rank.run(train_on_rank, **tiny_recipe("sd3_sft", tmp_path / "run", tiny_pipelines("sd3"), *words, data=digits))
    assert counted(tmp_path / "run") == predicted(tmp_path / "run", 1, num_images=5)
