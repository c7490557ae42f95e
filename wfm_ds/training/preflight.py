"""Checks of model, data and rewards before a run writes anything, also used by `--check`.

run/folder.py checks the output folder.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path

import torch

from wfm_ds.algorithms import engine_policies
from wfm_ds.data.datasets import TrainingData, buckets_of, inputs_of, load_data, readable
from wfm_ds.data.stream import HfStream
from wfm_ds.distributed.accelerator import accelerator_present, uses_cuda
from wfm_ds.distributed.world import ranks_per_node
from wfm_ds.engine.packages import require_packages
from wfm_ds.errors import RecipeError
from wfm_ds.evaluation.paired import MIN_PROMPTS
from wfm_ds.models.hub import name_of
from wfm_ds.models.loading import chosen_device
from wfm_ds.monitoring.trackers.choice import require_trackers
from wfm_ds.pipes.sockets import check_endpoint
from wfm_ds.recipe.deepspeed import deepspeed_config
from wfm_ds.recipe.derived import derive, num_replicas
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardFunction
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.service import endpoints, places, trainer_keys
from wfm_ds.run.checked import Checked
from wfm_ds.run.estimate import estimate
from wfm_ds.run.fit import verdict
from wfm_ds.run.folder import Start, find_start
from wfm_ds.run.hub_model import at_commit
from wfm_ds.run.model import check_attention, family_of, load_model
from wfm_ds.training.alarm import PROMPTS
from wfm_ds.training.texts_ahead import keeps_encoders
from wfm_ds.types import Prompt

log = logging.getLogger(__name__)

NUM_DECODED = 32  # samples that --check reads
MIN_VISITS = 3  # draws per prompt in a run; with fewer, reward statistics of most prompts are unreliable


def check_rewards(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Check that the rewards exist and can score these prompts, and that a running service replies.

    Raises RewardError or RecipeError.
    """
    reward = recipe.scoring
    if reward is None:
        return
    family, inputs = family_of(recipe), recipe.data.inputs
    for function in reward.functions:
        check_needs(function, prompts, local=reward.spawn, video=family.video, told=inputs, takes=family.takes)
    if reward.endpoint is not None:
        RewardClient(reward.endpoint, reward, run="check", client="check").close()


def check_workers(recipe: Recipe) -> None:
    """Raise RecipeError, PipeError or KeyFileError if rollout workers cannot be started or reached."""
    rollout = recipe.rl.rollout
    if accelerator_present():  # without an accelerator, --check may run for another machine
        places(rollout, num_ranks=0)
    keys = trainer_keys(rollout)
    if rollout.bind != "ipc":
        for endpoint in endpoints(rollout.bind, None):
            check_endpoint(endpoint, keys=keys is not None)


def check_needs(
    function: RewardFunction,
    prompts: Sequence[Prompt],
    *,
    local: bool,
    video: bool,
    told: Sequence[str] = (),
    takes: Container[str] = (),
) -> None:
    """Check that a reward gets the media type, inputs and metadata it needs. Raises RecipeError.

    is_local: whether this run starts the reward service; unknown rewards of a remote service are skipped. makes_video:
    whether the model generates videos. provided_inputs: data.inputs. accepted_inputs: inputs of the model.
    """
    from wfm_reward import registry as rewards

    if not local and function.name not in rewards.names():
        return
    reward = rewards.describe(function.name)
    if not video and "image" not in reward.media:
        raise RecipeError(
            f"reward {function.name} scores videos, but the model generates images: choose another reward or model"
        )
    for key in reward.needs_inputs:
        if key in told:
            continue
        if key in takes:
            raise RecipeError(f"reward {function.name} needs {key}: add it to data.inputs, or choose another reward")
        raise RecipeError(
            f"reward {function.name} needs the input {key}, which this model does not accept: choose another "
            "reward, or a model that accepts it (docs/models.md#inputs)"
        )
    for key in reward.needs:
        missing = [p.id for p in prompts if key not in p.metadata]
        if missing:
            raise RecipeError(
                f"reward {function.name} needs the metadata key {key!r}, missing in {len(missing)} of {len(prompts)} "
                f"prompts, e.g. {missing[0]}: add it to the prompt file or choose another reward"
            )
    if local:
        rewards.check(function.name, "cpu", function.options, function.max_batch)


def preflight(recipe: Recipe, world_size: int) -> TrainingData:
    """Run the cheap checks in the order in which a user would fix problems, and load the data. Writes nothing."""
    num_replicas(recipe, world_size, ranks_per_node=ranks_per_node(world_size))
    derived = derive(recipe, world_size)
    deepspeed_config(
        recipe,
        accumulation=derived.accumulation,
        policies=engine_policies(recipe),
        world_size=world_size,
        ranks_per_node=ranks_per_node(world_size),
    )
    require_packages(recipe)
    require_trackers(recipe)
    family_of(recipe)
    data = load_data(recipe)
    for warning in [*recipe.algorithm.doubts(), *choice_doubts(recipe, data), *judge_doubts(recipe, data)]:
        log.warning(warning)
    if recipe.is_async:
        check_workers(recipe)
    if recipe.scoring is not None:
        check_rewards(recipe, list({p.id: p for p in [*data.prompts, *data.shown]}.values()))
    return data


def visits(recipe: Recipe, data: TrainingData) -> float:
    """Return the average number of times a prompt is drawn in the run."""
    return recipe.run.steps * recipe.rl.rollout.prompts_per_step / len(data.prompts)


def choice_doubts(recipe: Recipe, data: TrainingData) -> list[str]:
    """Return a warning if prompts are chosen by reward std but most are drawn fewer than MIN_PROMPT_DRAWS times."""
    if recipe.data.choose == "even" or visits(recipe, data) >= MIN_VISITS:
        return []
    return [
        f"data.choose: reward_std needs rewards of earlier draws, but this run draws each of its {len(data.prompts)} "
        f"prompts only {visits(recipe, data):.2g} times: set data.choose: even, or use fewer prompts"
    ]


def judge_doubts(recipe: Recipe, data: TrainingData) -> list[str]:
    """Return warnings if the alarm of held-out rewards is unlikely to work: too few prompts or evaluations."""
    if not recipe.validation.held_out_rewards or not recipe.is_rl:
        return []
    warnings, num_prompts = [], min(len(data.shown), recipe.validation.num_prompts)
    if num_prompts < PROMPTS:
        effect = "no alarm is possible" if num_prompts < MIN_PROMPTS else "a decrease may be missed"
        warnings.append(
            f"validation.held_out_rewards score only {num_prompts} prompts: {effect}. "
            f"Set validation.num_prompts to {PROMPTS}"
        )
    if recipe.validation.every == 0:
        warnings.append(
            "validation.held_out_rewards are only evaluated at the end, too late for an alarm: set validation.every"
        )
    return warnings


def examine(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Checked:
    """Check a diffusion recipe and return the report of `--check`. Raises UserError if a check fails."""
    recipe = at_commit(recipe, overwrite=overwrite)
    start = find_start(recipe, world_size, overwrite=overwrite)
    data = preflight(recipe, world_size)
    model = load_model(recipe, torch.device("cpu"))
    kernel = check_attention(recipe, model, chosen_device(None))
    samples = data.samples
    if recipe.data.streaming:
        samples = [row.sample for row in HfStream(recipe.data).read(NUM_DECODED)]
    num_samples, inputs = len(samples) + len(data.held_out), inputs_of(recipe, model, data)
    readable(samples, recipe, buckets_of(recipe, model), NUM_DECODED, whole=num_samples, inputs=inputs)
    check_spawned_rewards(recipe)
    sizes = estimate(recipe, model, world_size, keeps_encoders=keeps_encoders(recipe, model, data, world_size))
    choice = "" if recipe.data.choose == "even" else f", by reward_std, {visits(recipe, data):.3g} draws each"
    number = "a stream" if recipe.data.streaming else len(data.samples)
    counts = (
        ("prompts", f"{len(data.prompts)}{choice}")
        if recipe.is_rl
        else ("samples", f"{number} to train on, {len(data.held_out)} held out")
    )
    facts = dict(
        [
            ("recipe", f"{recipe.algorithm.name}, {'LoRA' if recipe.lora else 'all weights'}"),
            ("model", name_of(model.path)),
            ("attention", kernel),
            counts,
            ("output", beginning(start)),
        ]
    )
    judged = verdict(recipe, sizes, gpu_memory())
    return Checked(facts=facts, derived=derive(recipe, world_size), memory=sizes, verdict=judged)


def counted(recipe: Recipe, data: TrainingData) -> str:
    """Return the number of prompts or samples as text."""
    if recipe.is_rl:
        return f"{len(data.prompts)} prompts"
    number = "a stream of" if recipe.data.streaming else len(data.samples)
    return f"{number} samples to train on, {len(data.held_out)} held out"


def gpu_memory() -> int | None:
    """Return the memory of the first GPU in bytes; None without a GPU."""
    return torch.cuda.get_device_properties(0).total_memory if uses_cuda() else None


def beginning(start: Start) -> str:
    """Return the start of the run (new, resumed, finished) as text for `--check`."""
    if start.finished:
        return f"finished run (step {start.step}): nothing to do"
    return f"continues after step {start.step} from {start.checkpoint}" if start.checkpoint else "a new run"


def check_spawned_rewards(recipe: Recipe) -> None:
    """Start and stop the reward service, to find a missing package or model before training."""
    reward = recipe.scoring
    if reward is None or not reward.spawn:
        return
    from wfm_ds.rollout.rewards import RewardService

    with tempfile.TemporaryDirectory(prefix="wfm-check-") as folder, RewardService(reward, Path(folder)):
        pass
