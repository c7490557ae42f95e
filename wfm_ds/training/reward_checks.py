"""Checks that rewards can score the samples of a run or evaluation."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

from wfm_ds.data.datasets import TrainingData
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardFunction
from wfm_ds.rollout.rewards import RewardClient, list_reference_rewards
from wfm_ds.runs.model_loading import find_family
from wfm_ds.training.validation_frames import has_recorded_videos
from wfm_ds.types import MASK, SOURCE, Prompt

log = logging.getLogger(__name__)


def check_rewards(recipe: Recipe, data: TrainingData) -> None:
    """Check that the rewards can score the samples and, if reward.endpoint is set, that the service replies.

    Logs a warning if an editing model is trained and none of its rewards sees the source images. Raises RewardError or
    RecipeError if a check fails.
    """
    reward = recipe.all_reward_settings
    if reward is None:
        return
    family, inputs = find_family(recipe), recipe.data.inputs
    prompts = list({p.id: p for p in [*data.prompts, *data.validation_prompts]}.values())
    has_recordings = has_recorded_videos(recipe, data)
    for function in reward.functions:
        check_reward_needs(
            function,
            prompts,
            is_local=reward.spawn,
            makes_video=family.is_video,
            makes_sound=family.makes_sound,
            provided_inputs=[*inputs, *recipe.data.reward_inputs],
            accepted_inputs=family.input_specs,
            has_recordings=has_recordings,
        )
    trained = recipe.rl.reward.functions if recipe.is_rl and recipe.uses_rewards else []  # without held-out rewards
    if trained and SOURCE in inputs and not any(may_see_images(f, is_local=reward.spawn) for f in trained):
        log.warning(
            "no reward compares samples with their source: the model may learn to change more than the prompt says. "
            "Add a reward such as preservation (docs/rewards.md)"
        )
    if reward.endpoint is not None:
        client = RewardClient(reward.endpoint, reward, run="check", client="check")
        client.close()
        check_service_references(recipe, client.reference_rewards, has_recordings=has_recordings)


def check_service_references(recipe: Recipe, names: Sequence[str], *, has_recordings: bool) -> None:
    """Raise RecipeError if a reward of a running service needs recordings that validation or rollouts do not have.

    names: rewards of the service that compare samples with recordings. has_recordings: whether validation samples can
    be compared with recordings.
    """
    if names and not has_recordings:
        raise missing_recordings(names[0])
    trained = [] if recipe.reward is None else [function.name for function in recipe.reward.functions]
    if any(name in trained for name in names) and not list_reference_rewards(recipe.reward):
        raise RecipeError(
            f"reward {' and '.join(names)} of the service compares samples with recordings, which rollouts keep only "
            "for built-in rewards or reward.spawn: true: use the reward continuation, or start the service with the run"
        )


def may_see_images(function: RewardFunction, *, is_local: bool) -> bool:
    """Return whether a reward looks at source images. True for classes that only a remote service knows.

    is_local: whether this run starts the reward service.
    """
    from wfm_reward import registry as rewards

    reward = rewards.find_reward_class(function.name, is_local=is_local)
    return reward is None or reward.sees_images


def missing_recordings(name: str) -> RecipeError:
    return RecipeError(
        f"reward {name} compares samples with the recordings that they continue, but validation samples have none: "
        "choose another reward, or use videos with conditioning frames (without validation.prompts; in wfm evaluate "
        "by --data)"
    )


def check_reward_needs(
    function: RewardFunction,
    prompts: Sequence[Prompt],
    *,
    is_local: bool,
    makes_video: bool,
    makes_sound: bool = False,
    provided_inputs: Sequence[str] = (),
    accepted_inputs: Container[str] = (),
    has_recordings: bool,
) -> None:
    """Raise RecipeError if a reward needs a media type, input, metadata or recording that the run does not provide.

    is_local: whether this run starts the reward service. For a remote service, only built-in rewards are checked.
    provided_inputs: names in data.inputs and data.reward_inputs.
    accepted_inputs: names of the inputs that the model accepts.
    has_recordings: whether validation samples can be compared with recordings.
    Raises RewardError if a local reward has an invalid name, option or batch size.
    """
    from wfm_reward import registry as rewards

    reward = rewards.find_reward_class(function.name, is_local=is_local)
    if reward is None:
        return
    if not makes_video and "image" not in reward.media_types:
        raise RecipeError(
            f"reward {function.name} scores videos, but the model generates images: choose another reward or model"
        )
    if reward.needs_reference and not has_recordings:
        raise missing_recordings(function.name)
    if reward.needs_sound and not makes_sound:
        raise RecipeError(
            f"reward {function.name} scores sound, but the model generates none: choose another reward or model"
        )
    for key in [*reward.required_inputs, *([SOURCE] if reward.sees_images else [])]:
        if key in provided_inputs:
            continue
        if key in accepted_inputs:
            raise RecipeError(f"reward {function.name} needs {key}: add it to data.inputs, or choose another reward")
        raise RecipeError(
            f"reward {function.name} needs the input {key}, which this model does not accept: choose another "
            "reward, or a model that accepts it (docs/inputs.md)"
        )
    for key in reward.required_metadata:
        missing = [p.id for p in prompts if key not in p.metadata]
        if missing:
            raise RecipeError(
                f"reward {function.name} needs the metadata key {key!r}, missing in {len(missing)} of {len(prompts)} "
                f"prompts, e.g. {missing[0]}: add it to the prompt file or choose another reward"
            )
    if is_local:
        checked = rewards.check_reward(function.name, function.device, function.options, function.max_batch)
        if checked.needs_mask and MASK not in provided_inputs:
            other = ", or set options.whole: true" if "whole" in reward.option_parameters() else ""
            raise RecipeError(f"reward {function.name} needs masks: add data.reward_inputs: [mask]{other}")
