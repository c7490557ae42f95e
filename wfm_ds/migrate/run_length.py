"""The length of a run in steps. Cosmos-RL counts epochs, so the samples of the dataset must be counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from wfm_ds.data.prompts import load_prompts
from wfm_ds.errors import DataError
from wfm_ds.migrate import language_values
from wfm_ds.migrate.config import SFT, VLM_SFT, CosmosConfig, NoCounterpart
from wfm_ds.migrate.diffusers_values import data_split, num_data_ranks

POLICY_TABLE = "train.train_policy"


def run_steps(_: Any, source: CosmosConfig) -> int:
    """Return --steps if it is set. Otherwise, return the steps of all epochs, at most train.max_num_steps.

    Raises NoCounterpart if the data cannot be counted and train.max_num_steps is not set, or if all epochs together are
    shorter than one step.
    """
    if source.steps is not None:
        return source.steps
    max_steps = source.settings.get("train.max_num_steps")
    epochs = epoch_steps(source)
    if epochs is None and max_steps is None:
        raise NoCounterpart(
            f"the epochs of {find_data_folder(source) or 'an unnamed data set'} cannot be counted on this machine; "
            "set --steps, or run this command on a machine with the data"
        )
    if epochs == 0:
        raise NoCounterpart("all epochs together are shorter than one step; set --steps")
    return min(steps for steps in (epochs, max_steps) if steps is not None)


def epoch_steps(source: CosmosConfig) -> int | None:
    """Return the number of optimizer steps (SFT) or RL steps in all epochs, or None if it cannot be counted."""
    samples, ranks = num_samples(source), num_data_ranks(source)
    if samples is None or ranks is None:
        return None
    epochs, batch = int(source["train.epoch"]), int(source["train.train_batch_per_replica"])
    if source.mode in (SFT, VLM_SFT):
        round_steps = math.floor if source.settings.get(f"{POLICY_TABLE}.dataloader_drop_last", True) else math.ceil
        return epochs * int(round_steps(math.ceil(samples / ranks) / batch))
    replicas = int(source["policy.parallelism.n_init_replicas"])
    return epochs * samples * int(source["rollout.n_generation"]) // (batch * replicas)


def num_samples(source: CosmosConfig) -> int | None:
    """Return the number of samples (SFT) or prompts (RL), or None if the data is not on this machine."""
    if source.mode == VLM_SFT:
        return language_values.count_conversations(source)
    folder = find_data_folder(source)
    if folder is None or not Path(folder).is_dir():
        return None
    if source.mode == SFT:
        return sum(1 for _ in Path(folder).glob("*.json")) or None
    try:
        split_name = data_split(source.settings.get(f"{POLICY_TABLE}.dataset.split", "train"), source)
        return len(load_prompts(Path(folder), source.settings[f"{POLICY_TABLE}.dataset.name"], split_name))
    except (DataError, KeyError, NoCounterpart):
        return None


def find_data_folder(source: CosmosConfig) -> str | None:
    for key in (language_values.ANNOTATIONS, f"{POLICY_TABLE}.dataset.local_dir", f"{POLICY_TABLE}.dataset.name"):
        if source.settings.get(key):
            return str(source.settings[key])
    return None
