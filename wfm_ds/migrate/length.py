"""The length of a run: steps are counted here, epochs there, and an epoch is as long as its data.

The data are counted where their folder is on this machine; elsewhere `--steps` says the length.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from wfm_ds.data.prompts import load_prompts
from wfm_ds.errors import DataError
from wfm_ds.migrate import language_values
from wfm_ds.migrate.config import SFT, VLM_SFT, CosmosConfig, NoCounterpart
from wfm_ds.migrate.values import data_ranks, split

POLICY = "train.train_policy"


def run_steps(_: Any, source: CosmosConfig) -> int:
    """The number that the user of the command gave; else the smaller one of max_num_steps and all epochs."""
    if source.steps is not None:
        return source.steps
    most = source.given.get("train.max_num_steps")
    epochs = steps_of_epochs(source)
    if epochs is None and most is None:
        raise NoCounterpart(
            f"the epochs of {data_folder(source) or 'data without a name'} cannot be counted on this machine: give the "
            "number of steps with --steps, or run this command where the data are"
        )
    if epochs == 0:
        raise NoCounterpart("the epochs are shorter than one step: give the number of steps with --steps")
    return min(steps for steps in (epochs, most) if steps is not None)


def steps_of_epochs(source: CosmosConfig) -> int | None:
    """Optimizer steps (SFT) or RL steps of all epochs; None where the data cannot be counted."""
    samples, ranks = num_samples(source), data_ranks(source)
    if samples is None or ranks is None:
        return None
    epochs, batch = int(source["train.epoch"]), int(source["train.train_batch_per_replica"])
    if source.mode in (SFT, VLM_SFT):
        whole = math.floor if source.given.get(f"{POLICY}.dataloader_drop_last", True) else math.ceil
        return epochs * int(whole(math.ceil(samples / ranks) / batch))
    replicas = int(source["policy.parallelism.n_init_replicas"])
    return epochs * samples * int(source["rollout.n_generation"]) // (batch * replicas)


def num_samples(source: CosmosConfig) -> int | None:
    """Captioned media or conversations (SFT) or prompts (RL); None where they are not on this machine."""
    if source.mode == VLM_SFT:
        return language_values.count(source)
    folder = data_folder(source)
    if folder is None or not Path(folder).is_dir():
        return None
    if source.mode == SFT:
        return sum(1 for _ in Path(folder).glob("*.json")) or None
    try:
        given = source.given.get(f"{POLICY}.dataset.split", "train")
        return len(load_prompts(Path(folder), source.given[f"{POLICY}.dataset.name"], split(given, source)))
    except (DataError, KeyError, NoCounterpart):
        return None


def data_folder(source: CosmosConfig) -> str | None:
    for key in (language_values.ANNOTATIONS, f"{POLICY}.dataset.local_dir", f"{POLICY}.dataset.name"):
        if source.given.get(key):
            return str(source.given[key])
    return None
