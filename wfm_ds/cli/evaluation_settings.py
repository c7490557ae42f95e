"""Sampling options and rewards of `wfm evaluate`, with defaults from the recipes of the evaluated runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from wfm_ds.cli.call_defaults import fill_from_call
from wfm_ds.cli.evaluation_models import EvaluatedModel
from wfm_ds.cli.evaluation_samples import EvaluationData
from wfm_ds.cli.sampling_options import MAX_PROMPT_BATCH, MODEL_OPTIONS, SAMPLING_OPTIONS, add_sampling_options
from wfm_ds.errors import UserError
from wfm_ds.evaluation.results import ModelResults, TrainedRewards, scores_by_reward, unit_std_reward_recipe
from wfm_ds.models import registry
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.training.reward_checks import check_reward_needs
from wfm_ds.training.validation_frames import has_recorded_videos
from wfm_ds.types import MASK, SOURCE, Prompt
from wfm_reward import registry as rewards


def fill_options(args: argparse.Namespace, entries: Sequence[EvaluatedModel], recipe: Recipe | None) -> None:
    """Set omitted options in `args`.

    The first source that has a value is used: the recipe, the call.json of a trained model, the call.json of the base
    model, the defaults of `wfm generate`. Raises UserError if the pipeline has no default size, or if options
    contradict each other.
    """
    defaults = argparse.ArgumentParser()
    add_sampling_options(defaults)
    names = (*SAMPLING_OPTIONS, *MODEL_OPTIONS, "source_size")
    values: dict[str, Any] = {name: defaults.get_default(name) for name in names}
    if recipe is not None:
        values |= {name: getattr(recipe.sampling, key) for name, key in SAMPLING_OPTIONS.items()}
        values |= {name: getattr(recipe.model, name) for name in MODEL_OPTIONS}
        values["source_size"] = recipe.data.source_size
        is_even = (args.grid or values["grid"]) == "even"
        if not is_even:  # the recipe's shift then applies only to rollouts
            values["shift"] = None
        if values["solver"] == ("dpm2" if is_even else "cps"):  # --grid is not that of the recipe
            values["solver"] = None
    values["batch"] = min(args.seeds, MAX_PROMPT_BATCH)
    values["clips"] = recipe.validation.clips if recipe is not None and args.data is not None else 1
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    folders = [
        entry.lora or registry.resolve_pipeline(entry.model, args.family, entry.revision, weights=False)
        for entry in (*entries[1:], entries[0])
    ]
    call = fill_from_call(args, entries[0].model, folders[-1], folders)
    for name in ("height", "width"):
        if getattr(args, name) is None and call.get(name) is None:
            raise UserError(
                f"--{name} is required: no run recipe found, and {entries[0].argument}/call.json has no {name}"
            )
        setattr(args, name, getattr(args, name) or call[name])


def select_functions(
    args: argparse.Namespace,
    entries: Sequence[EvaluatedModel],
    prompts: Sequence[Prompt],
    data: EvaluationData | None = None,
    inputs: Sequence[str] = (),
) -> dict[str, RewardFunction]:
    """Return {reward name: settings} for the rewards in --rewards and --held-out.

    The default of --rewards and all reward options come from the runs. If the runs have no rewards, they come from the
    recipe that --data names. If that recipe has none either, videos with recordings are scored by `continuation`.
    inputs: names of the inputs that all samples have.

    Raises UserError if a reward is unknown or cannot score these prompts, if runs use different options for the same
    reward, or if a held-out reward was used for training.
    """
    has_recordings = data is not None and has_recorded_videos(data.recipe, data.data)
    known: dict[str, RewardFunction] = {}
    for entry in entries:
        for function in run_functions(entry.recipe):
            if known.setdefault(function.name, function).options != function.options:
                raise UserError(
                    f"{entry.argument}: its run uses other options for {function.name}: evaluate the runs separately"
                )
    for function in run_functions(None if data is None else data.recipe):
        known.setdefault(function.name, function)
    trained = {name for entry in entries for name in training_reward_names(entry.recipe)}
    family = registry.find_family(
        registry.resolve_pipeline(entries[0].model, args.family, entries[0].revision, weights=False), args.family
    )
    video = family.is_video
    reward_names = list(known) if args.rewards is None else args.rewards
    if not reward_names and has_recordings and video:
        reward_names = ["continuation"]  # the only reward that needs nothing but the recordings
    if not reward_names:
        raise UserError("--rewards is required, e.g. --rewards pickscore; see wfm rewards")
    for name in args.held_out:
        if name in (trained or reward_names):
            raise UserError(f"--held-out: {name} was used for training, so it is not held out: move it to --rewards")
    functions: dict[str, RewardFunction] = {}
    for name in dict.fromkeys([*reward_names, *args.held_out]):
        if rewards.get_reward_class(name).sees_images and data is None and SOURCE not in inputs:
            raise UserError(
                f"reward {name} compares samples with their source: name the images to edit in a .jsonl file of "
                "prompts (docs/evaluate.md), or choose another reward"
            )
        options = known[name].options if name in known else {}
        functions[name] = RewardFunction(name=name, options=options, device=args.reward_device)
        if data is None and MASK not in inputs and rewards.create_reward(name, args.reward_device, options).needs_mask:
            raise UserError(
                f"reward {name} needs masks: name them with the key mask in a .jsonl file of prompts "
                "(docs/evaluate.md), or choose another reward"
            )
        check_reward_needs(
            functions[name],
            prompts,
            is_local=True,
            makes_video=video,
            makes_sound=family.makes_sound,
            provided_inputs=inputs,
            has_recordings=has_recordings,
        )
    return functions


def run_functions(recipe: Recipe | None) -> list[RewardFunction]:
    return [] if recipe is None or recipe.reward is None else recipe.reward.functions


def training_reward_names(recipe: Recipe | None) -> list[str]:
    return [function.name for function in run_functions(recipe) if function.weight != 0]


def training_rewards(
    recipe: Recipe | None, args: argparse.Namespace, measured: Sequence[str], base: ModelResults
) -> TrainedRewards:
    """Return the rewards that a model was trained on. If it has no recipe, these are the rewards in --rewards.

    measured: names of all measured rewards. base: results of the base model.
    """
    names = training_reward_names(recipe) if recipe is not None else list(args.rewards or [])
    measured_names = [name for name in names if name in measured]
    reward: RewardRecipe | None = None
    if recipe is not None and recipe.reward is not None and measured_names:
        functions = [function for function in recipe.reward.functions if function.name in measured_names]
        reward = recipe.reward.model_copy(update={"functions": functions})
    elif measured_names:
        reward = unit_std_reward_recipe(measured_names, scores_by_reward(base.samples, args.seeds))
    backbones = {rewards.get_reward_class(name).backbone for name in names} - {""}
    related = frozenset(
        name for name in measured if name not in names and rewards.get_reward_class(name).backbone in backbones
    )
    return TrainedRewards(names=names, reward=reward, related=related)
