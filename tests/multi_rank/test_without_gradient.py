"""Loss terms without a gradient are skipped. The weights are bitwise equal to a run with all terms."""

import json
from unittest import mock

import pytest
import torch

from multi_rank.resuming import train_on_rank, weights

pytestmark = pytest.mark.slow

STEPS = 2
# Advantages by step, equal on both ranks. The first update trains samples 0 and 2 of a rank, the second 1 and 3.
# In the first update of step 2 no loss term has a gradient; only momentum and weight decay change the weights.
ADVANTAGES = {1: [1.0, 0.0, 0.0, -1.0], 2: [0.0, 1.0, 0.0, -0.5]}
OVERRIDES = [
    *(f"run.steps={STEPS}", "optimizer.lr=3e-2", "optimizer.weight_decay=0.1", "logging.console=false"),
    *("algorithm.kl_beta=0", "algorithm.zero_std=keep", "algorithm.old_decay=copy", "algorithm.updates_per_rollout=2"),
    # One loss term per micro-batch. In larger batches, skipping terms would change the order of summation.
    *("engine.micro_batch_size=1", "engine.guard=true"),
    *("validation.every=0", "validation.at_start=false", "validation.num_prompts=1", "validation.seeds=[1]"),
]


def train(recipe, overrides, run_all):
    """Train with fixed advantages. run_all: also run loss terms without a gradient."""
    from wfm_ds.algorithms.advantages import Advantages
    from wfm_ds.algorithms.diffusion_nft import DiffusionNft

    calls = []

    def known(self, rewards, groups):
        calls.append(len(groups))
        values = ADVANTAGES[len(calls)]
        return Advantages(values * (len(groups) // len(values)), {})

    with (
        mock.patch.object(DiffusionNft, "compute_advantages", known),
        mock.patch.object(DiffusionNft, "has_gradient", (lambda *_: True) if run_all else DiffusionNft.has_gradient),
    ):
        return train_on_rank(recipe, overrides)


def samples_trained(folder):
    """Return the number of training forwards of rank 0 (one sample each), by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["perf/forwards_policy"] for line in lines if "perf/forwards_policy" in line]


@pytest.mark.parametrize(("stage", "lora"), [("zero2", "{rank: 4, alpha: 8}"), ("zero3", "null")])
@pytest.mark.ci_cases("zero2-{rank: 4, alpha: 8}")
def test_skipping_terms_without_gradient_does_not_change_the_weights(train_tiny, tmp_path, stage, lora):
    for folder, run_all in (("all", True), ("few", False)):
        changes = [*OVERRIDES, f"engine.deepspeed={stage}", f"lora={lora}"]
        train_tiny(folder, "sd3_nft", *changes, ranks=2, function=train, run_all=run_all)
    everything, few = (weights(tmp_path / folder, STEPS) for folder in ("all", "few"))
    assert everything.keys() == few.keys() != set()
    assert all(torch.equal(few[name], tensor) for name, tensor in everything.items())
    # Each sample has two noise levels, so each step has 8 loss terms. Step 1 skips the two terms of sample 2. It keeps
    # the terms of sample 1, because in the second update the policy differs from old. Step 2 skips three of the four
    # terms of its first update. The fourth runs, so that the optimizer step is applied.
    assert samples_trained(tmp_path / "all") == [8, 8]
    assert samples_trained(tmp_path / "few") == [6, 5]
