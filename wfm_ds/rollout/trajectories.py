"""Counterfactual trajectories: samples start from a recorded clip but follow actions that were not recorded with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from wfm_ds.data.action_data import ActionData
from wfm_ds.data.order import permutation
from wfm_ds.data.trajectories import ACTIONS, DOMAIN, POSES, Floats
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import derive_seed
from wfm_ds.types import Prompt

log = logging.getLogger(__name__)


class CounterfactualTrajectories:
    """Replaces actions and camera paths of prompts according to rollout.trajectories, identically on every rank."""

    def __init__(self, recipe: Recipe, actions: ActionData | None) -> None:
        rollout = recipe.rl.rollout
        self.mode, self.seed = rollout.trajectories, recipe.run.seed
        self._has_warned = False
        self._library = None if actions is None else actions.library

    def replace_trajectories(self, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
        """Return the prompts with new actions and camera paths. prompts: one per group of RL step `step`."""
        if self.mode == "shuffle":
            shuffled = shuffle_trajectories(prompts, seed=self.seed, step=step)
            if not self._has_warned and all(new is old for new, old in zip(shuffled, prompts, strict=True)):
                self._has_warned = True
                log.warning(
                    "rollout.trajectories: shuffle changed nothing in step %d: no two of its %d groups share a domain. "
                    "Increase rollout.prompts_per_step",
                    step,
                    len(prompts),
                )
            return shuffled
        if self._library is None:
            return list(prompts)
        indices = [derive_seed(self.seed, "trajectories", step, g) % len(self._library) for g in range(len(prompts))]
        return [
            replace(prompt, inputs={**prompt.inputs, ACTIONS: self._library[index]})
            for prompt, index in zip(prompts, indices, strict=True)
        ]


def shuffle_trajectories(prompts: Sequence[Prompt], *, seed: int, step: int) -> list[Prompt]:
    """Return the prompts with actions and camera paths exchanged between prompts of the same `domain`.

    A prompt keeps its own trajectory only if its domain has no other prompt.
    """
    domains: dict[float, list[int]] = {}
    for i, prompt in enumerate(prompts):
        domains.setdefault(float(prompt.inputs.get(DOMAIN, 0)), []).append(i)
    shuffled = list(prompts)
    for domain, indices in sorted(domains.items()):
        order = permutation(len(indices), derive_seed(seed, "trajectories", step, str(domain)))
        if len(indices) == 1:
            continue
        ring = [indices[i] for i in order]  # each prompt takes the trajectory of the next one
        for target, source in zip(ring, [*ring[1:], ring[0]], strict=True):
            shuffled[target] = replace(
                prompts[target], inputs=transplant_trajectory(prompts[target].inputs, prompts[source].inputs)
            )
    return shuffled


def transplant_trajectory(target: Mapping[str, Floats], source: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return `target` with the actions and the camera path of `source`.

    The camera path is moved so that it starts at the first pose of `target`.
    """
    inputs = dict(target)
    if ACTIONS in target:
        inputs[ACTIONS] = source[ACTIONS]
    if POSES in target:
        start = target[POSES][0].astype(np.float64) @ np.linalg.inv(source[POSES][0].astype(np.float64))
        inputs[POSES] = (start @ source[POSES].astype(np.float64)).astype(np.float32)
    return inputs
