"""Counterfactual trajectories: samples of an RL step that start where a clip does, and are told to go elsewhere.

To follow actions cannot be learned from the recorded continuation alone: a model that remembers it need not listen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from wfm_ds.data.actions import Actions
from wfm_ds.data.order import permuted
from wfm_ds.data.trajectories import ACTIONS, DOMAIN, POSES, Floats
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import derive_seed
from wfm_ds.types import Prompt

log = logging.getLogger(__name__)


class Trajectories:
    """Trajectories of the groups of an RL step, by rollout.trajectories. The same on every rank, at any step."""

    def __init__(self, recipe: Recipe, actions: Actions | None) -> None:
        rollout = recipe.rl.rollout
        self.mode, self.seed = rollout.trajectories, recipe.run.seed
        self._has_warned = False
        self._library = None if actions is None else actions.library

    def of_step(self, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
        """Return the prompts of all groups of a step with the trajectories that their samples are told."""
        if self.mode == "shuffle":
            found = exchanged(prompts, seed=self.seed, step=step)
            if not self._has_warned and all(here is there for here, there in zip(found, prompts, strict=True)):
                self._has_warned = True
                log.warning(
                    "rollout.trajectories: shuffle exchanged nothing in step %d: each of its %d groups is alone in its "
                    "domain; raise rollout.prompts_per_step",
                    step,
                    len(prompts),
                )
            return found
        if self._library is None:
            return list(prompts)
        chosen = [derive_seed(self.seed, "trajectories", step, g) % len(self._library) for g in range(len(prompts))]
        return [
            replace(prompt, inputs={**prompt.inputs, ACTIONS: self._library[place]})
            for prompt, place in zip(prompts, chosen, strict=True)
        ]


def exchanged(prompts: Sequence[Prompt], *, seed: int, step: int) -> list[Prompt]:
    """Return the prompts of an RL step with one another's actions and camera paths: nobody keeps his own, and only
    those of one `domain` exchange. One that is alone in its domain keeps its own."""
    domains: dict[float, list[int]] = {}
    for i, prompt in enumerate(prompts):
        domains.setdefault(float(prompt.inputs.get(DOMAIN, 0)), []).append(i)
    found = list(prompts)
    for domain, members in sorted(domains.items()):
        order = permuted(len(members), derive_seed(seed, "trajectories", step, str(domain)))
        if len(members) == 1:
            continue
        ring = [members[place] for place in order]  # each takes the next one's
        for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
            found[here] = replace(prompts[here], inputs=moved(prompts[here].inputs, prompts[there].inputs))
    return found


def moved(here: Mapping[str, Floats], there: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the inputs of one sample with the trajectory of another, whose camera begins where its own does."""
    found = dict(here)
    if ACTIONS in here:
        found[ACTIONS] = there[ACTIONS]
    if POSES in here:
        start = here[POSES][0].astype(np.float64) @ np.linalg.inv(there[POSES][0].astype(np.float64))
        found[POSES] = (start @ there[POSES].astype(np.float64)).astype(np.float32)
    return found
