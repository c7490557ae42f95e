"""Diffusion-DPO (arXiv 2311.12908) of flows, with the same beta at all noise levels (Flow-DPO, arXiv 2501.13918).

A policy prefers of two media the one whose noised velocity it predicts better than the reference does, by more than it
does so for the other one. The loss is that of a logistic regression on this preference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.supervised import Supervised
from wfm_ds.recipe.algorithms import DpoAlgorithm


def implicit_rewards(errors: Tensor, ref_errors: Tensor, beta: float) -> Tensor:
    """Return -(beta / 2) * (l - l_ref), the implicit rewards of media by their velocity errors: any equal shapes [2,
    ...], the chosen ones first. Raises ValueError for others."""
    if errors.shape != ref_errors.shape or errors.ndim < 2 or len(errors) != 2:
        raise ValueError(
            f"errors and those of the reference must both be [2, ...], got {list(errors.shape)} and "
            f"{list(ref_errors.shape)}"
        )
    return -beta / 2 * (errors - ref_errors)


def preference_loss(rewards: Tensor) -> Tensor:
    """Return -log sigmoid(r_chosen - r_rejected) of implicit rewards [2, ...]: [...], log 2 where policy and reference
    agree."""
    return -logsigmoid(rewards[0] - rewards[1])


def is_preferred(margins: Tensor) -> Tensor:
    """Return 1 where the chosen one has the larger reward, 0 where it has the smaller one, 1/2 where both are equal, as
    before the first update."""
    return (1 + torch.sign(margins)) / 2


class Dpo(Supervised):
    """Offline DPO: media [2, ...] are the chosen and the rejected one of each pair, with one noise and one sigma."""

    area = "dpo"
    settings: DpoAlgorithm

    def loss(self, errors: Tensor, sigma: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        rewards = implicit_rewards(errors, references["ref"], self.settings.beta)
        seen = rewards.detach()
        margin_B = seen[0] - seen[1]
        stats: Stats = {
            "dpo/accuracy": is_preferred(margin_B),
            "dpo/margin": margin_B,
            "dpo/chosen_reward": seen[0],
            "dpo/rejected_reward": seen[1],
        }
        return preference_loss(rewards), stats

    def held_out(self, errors: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The accuracy is of pairs, each judged by its mean reward over the noise levels."""
        rewards = implicit_rewards(errors, references["ref"], self.settings.beta)
        return preference_loss(rewards), {"accuracy": is_preferred((rewards[0] - rewards[1]).mean(dim=1))}
