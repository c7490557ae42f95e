"""The checks before a run writes anything: model, data, rewards. Also `--check`. The output folder: run/folder.py."""

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

NUM_DECODED = 32  # samples that --check looks into
MIN_VISITS = 3  # of a prompt: below it, little is known of most prompts when they are drawn


def check_rewards(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Known rewards that can score these prompts; a running service answers. Raises RewardError or RecipeError."""
    reward = recipe.scoring
    if reward is None:
        return
    family, told = family_of(recipe), recipe.data.inputs
    for function in reward.functions:
        check_needs(function, prompts, local=reward.spawn, video=family.video, told=told, takes=family.takes)
    if reward.endpoint is not None:
        RewardClient(reward.endpoint, reward, run="check", client="check").close()


def check_workers(recipe: Recipe) -> None:
    """Raises RecipeError, PipeError or KeyFileError for workers that could not be started, or not be reached."""
    rollout = recipe.rl.rollout
    if accelerator_present():  # --check on a machine without any may be for another one
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
    """`video`: whether the model makes videos; `told`: data.inputs, of what it `takes`. A reward of a service elsewhere
    may be unknown here; then the service itself is asked."""
    from wfm_reward import registry as rewards

    if not local and function.name not in rewards.names():
        return
    reward = rewards.describe(function.name)
    if not video and "image" not in reward.media:
        raise RecipeError(
            f"reward {function.name} scores videos, but the model makes images: choose another reward or model"
        )
    for key in reward.needs_inputs:
        if key in told:
            continue
        if key in takes:
            raise RecipeError(f"reward {function.name} needs {key}: name it in data.inputs, or choose another reward")
        raise RecipeError(
            f"reward {function.name} needs the input {key}, which samples of this model are not told: choose "
            "another reward, or a model that takes it (docs/models.md#inputs)"
        )
    for key in reward.needs:
        lacking = [p.id for p in prompts if key not in p.metadata]
        if lacking:
            raise RecipeError(
                f"reward {function.name} needs the metadata key {key!r}, which {len(lacking)} of {len(prompts)} "
                f"prompts lack, e.g. {lacking[0]}: add it to the prompt file or choose another reward"
            )
    if local:
        rewards.check(function.name, "cpu", function.options, function.max_batch)


def preflight(recipe: Recipe, world_size: int) -> TrainingData:
    """The data, once what can be refused cheaply was, in the order in which a user would fix it. Writes nothing."""
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
    for doubt in [*recipe.algorithm.doubts(), *choice_doubts(recipe, data), *judge_doubts(recipe, data)]:
        log.warning(doubt)
    if recipe.is_async:
        check_workers(recipe)
    if recipe.scoring is not None:
        check_rewards(recipe, list({p.id: p for p in [*data.prompts, *data.shown]}.values()))
    return data


def visits(recipe: Recipe, data: TrainingData) -> float:
    """Return how often a prompt is drawn in the run, on average."""
    return recipe.run.steps * recipe.rl.rollout.prompts_per_step / len(data.prompts)


def choice_doubts(recipe: Recipe, data: TrainingData) -> list[str]:
    """Say where rewards are to choose among prompts of which most are met once or twice."""
    if recipe.data.choose == "even" or visits(recipe, data) >= MIN_VISITS:
        return []
    return [
        f"data.choose: spread draws by what earlier steps said of a prompt, and this run draws each of its "
        f"{len(data.prompts)} prompts {visits(recipe, data):.2g} times: set data.choose: even, or use fewer prompts"
    ]


def judge_doubts(recipe: Recipe, data: TrainingData) -> list[str]:
    """Say where held-out judges could hardly raise an alarm, or not at all."""
    if not recipe.validation.judges or not recipe.is_rl:
        return []
    doubts, prompts = [], min(len(data.shown), recipe.validation.num_prompts)
    if prompts < PROMPTS:
        many = "no alarm can be raised" if prompts < MIN_PROMPTS else "a fall may be missed"
        doubts.append(f"validation.judges look at {prompts} prompts: {many}; set validation.num_prompts to {PROMPTS}")
    if recipe.validation.every == 0:
        doubts.append("validation.judges are asked at the end alone, too late for an alarm: set validation.every")
    return doubts


def examine(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Checked:
    """Return what `--check` tells when all is well (check.py). Raises UserError otherwise."""
    recipe = at_commit(recipe, overwrite=overwrite)
    start = find_start(recipe, world_size, overwrite=overwrite)
    data = preflight(recipe, world_size)
    model = load_model(recipe, torch.device("cpu"))
    kernel = check_attention(recipe, model, chosen_device(None))
    samples = data.samples
    if recipe.data.streaming:
        samples = [row.sample for row in HfStream(recipe.data).read(NUM_DECODED)]
    whole, inputs = len(samples) + len(data.held_out), inputs_of(recipe, model, data)
    readable(samples, recipe, buckets_of(recipe, model), NUM_DECODED, whole=whole, inputs=inputs)
    check_spawned_rewards(recipe)
    sizes = estimate(recipe, model, world_size, keeps_encoders=keeps_encoders(recipe, model, data, world_size))
    chosen = "" if recipe.data.choose == "even" else f", by spread, {visits(recipe, data):.3g} times each on average"
    known = "a stream" if recipe.data.streaming else len(data.samples)
    counts = (
        ("prompts", f"{len(data.prompts)}{chosen}")
        if recipe.is_rl
        else ("samples", f"{known} to train on, {len(data.held_out)} held out")
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
    """Say how much there is to train on."""
    if recipe.is_rl:
        return f"{len(data.prompts)} prompts"
    number = "a stream of" if recipe.data.streaming else len(data.samples)
    return f"{number} samples to train on, {len(data.held_out)} held out"


def gpu_memory() -> int | None:
    """Bytes of this machine's first GPU; None where there is none."""
    return torch.cuda.get_device_properties(0).total_memory if uses_cuda() else None


def beginning(start: Start) -> str:
    if start.finished:
        return f"a run that has finished with step {start.step}: nothing would be done"
    return f"continues after step {start.step} from {start.checkpoint}" if start.checkpoint else "a new run"


def check_spawned_rewards(recipe: Recipe) -> None:
    """Start the service once and stop it: a missing package or model shows here and not an hour later."""
    reward = recipe.scoring
    if reward is None or not reward.spawn:
        return
    from wfm_ds.rollout.rewards import RewardService

    with tempfile.TemporaryDirectory(prefix="wfm-check-") as folder, RewardService(reward, Path(folder)):
        pass
