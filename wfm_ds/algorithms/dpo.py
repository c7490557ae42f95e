"""Diffusion-DPO (arXiv 2311.12908) for flow matching, with one beta for all noise levels (Flow-DPO, 2501.13918)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.supervised import SupervisedAlgorithm
from wfm_ds.recipe.algorithms import DpoAlgorithm


def implicit_rewards(errors: Tensor, ref_errors: Tensor, beta: float) -> Tensor:
    """Return the implicit rewards -(beta / 2) * (l - l_ref) for the velocity errors l and l_ref.

    errors, ref_errors: l and l_ref, both [2, ...]. Index 0 is the chosen sample, index 1 the rejected sample. Raises
    ValueError for other shapes.
    """
    if errors.shape != ref_errors.shape or errors.ndim < 2 or len(errors) != 2:
        raise ValueError(
            f"errors and ref_errors must both be [2, ...], got {list(errors.shape)} and {list(ref_errors.shape)}"
        )
    return -beta / 2 * (errors - ref_errors)


def preference_loss(rewards: Tensor) -> Tensor:
    """Return -log sigmoid(r_chosen - r_rejected), [...], for implicit rewards [2, ...]."""
    return -logsigmoid(rewards[0] - rewards[1])


def is_preferred(margins: Tensor) -> Tensor:
    """Return 1 for a positive reward margin, 0 for a negative margin, and 1/2 for a margin of 0."""
    return (1 + torch.sign(margins)) / 2


class Dpo(SupervisedAlgorithm):
    """DPO on a fixed set of preference pairs. Both samples of a pair have the same noise and sigma.

    Velocity errors are [2, ...]: index 0 is the chosen sample, index 1 the rejected sample.
    """

    area = "dpo"
    settings: DpoAlgorithm

    def loss(self, errors: Tensor, sigma: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        rewards = implicit_rewards(errors, references["ref"], self.settings.beta)
        detached = rewards.detach()
        margin_B = detached[0] - detached[1]
        stats: Stats = {
            "dpo/accuracy": is_preferred(margin_B),
            "dpo/margin": margin_B,
            "dpo/chosen_reward": detached[0],
            "dpo/rejected_reward": detached[1],
        }
        return preference_loss(rewards), stats

    def validation_loss(self, errors: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        rewards = implicit_rewards(errors, references["ref"], self.settings.beta)
        return preference_loss(rewards), {"accuracy": is_preferred((rewards[0] - rewards[1]).mean(dim=1))}
