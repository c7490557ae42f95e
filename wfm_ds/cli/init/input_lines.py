"""Recipe lines for inputs other than texts: images to edit, actions and cameras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wfm_ds.cli.init.data_summary import DataSummary
from wfm_ds.cli.init.model_summary import PipelineSummary
from wfm_ds.cli.init.recipe_lines import RecipeLine, RecipeRequest
from wfm_ds.types import MASK, SOURCES, VIDEO_INPUTS
from wfm_reward import registry

PRESERVATION = "preservation"  # similarity to the source outside the mask
REWARD_OPTIONS = {"edit_judge": {"endpoint": "http://127.0.0.1:8000/v1", "model": "Qwen/Qwen2.5-VL-32B-Instruct"}}
"""{reward: examples of its required options}."""


def choose_inputs(request: RecipeRequest, model: PipelineSummary) -> list[str]:
    uses_actions = request.task == "actions" or (request.task == "rl" and request.data.are_videos)
    optional = [name for name in model.optional_inputs if uses_actions or name in (*SOURCES, *VIDEO_INPUTS)]
    return [name for name in (*model.inputs, *optional) if name in request.data.metadata_keys]


def input_lines(inputs: Sequence[str]) -> list[RecipeLine]:
    comment = "one file or value per sample (docs/inputs.md)"
    if "source" in inputs:
        comment = "images to edit (docs/inputs.md)"
    if "actions" in inputs:
        comment = "to normalize the actions, set actions.stats and actions.normalize (docs/inputs.md)"
    return [RecipeLine("inputs", list(inputs), comment)] if inputs else []


def edits_images(data: DataSummary, model: PipelineSummary) -> bool:
    return "source" in data.metadata_keys and "source" in (*model.inputs, *model.optional_inputs)


def edit_lines(request: RecipeRequest, inputs: Sequence[str], rewards: Sequence[str | None]) -> list[RecipeLine]:
    """Return the lines data.reward_inputs and data.target for images to edit, or [] if the model does not edit.

    rewards: names of all rewards.
    """
    if "source" not in inputs:
        return []
    lines = []
    uses_mask = any(registry.get_reward_class(name).sees_images for name in rewards if name is not None)
    if uses_mask and MASK in request.data.metadata_keys:
        lines.append(RecipeLine("reward_inputs", [MASK], "where an edit may change the source; only rewards see it"))
    if not request.data.has_target:
        lines.append(RecipeLine("target", False, "the data has no edited images"))
    return lines


def reward_line(request: RecipeRequest, inputs: Sequence[str]) -> RecipeLine:
    """Return the line for reward.functions. If edits have masks, `preservation` gets half of the weight."""
    assert request.reward is not None
    function: dict[str, Any] = {"name": request.reward}
    if request.reward in REWARD_OPTIONS:
        function["options"] = REWARD_OPTIONS[request.reward]
    if "source" not in inputs:
        return RecipeLine("functions", [function])
    has_mask = MASK in request.data.metadata_keys
    if request.reward == PRESERVATION:
        options = {} if has_mask else {"options": {"whole": True}}
        return RecipeLine("functions", [function | options], "alone, it rewards copies of the source: add a judge")
    comment = "set endpoint and model to your judge (docs/rewards.md)" if "options" in function else ""
    if not has_mask or request.held_out_reward == PRESERVATION:
        return RecipeLine("functions", [function], comment)
    return RecipeLine("functions", [function | {"weight": 0.5}, {"name": PRESERVATION, "weight": 0.5}], comment)


def view_lines(data: DataSummary) -> list[RecipeLine]:
    comment = "the first camera; rows of several are shown in one image (docs/robots.md)"
    return [] if data.views is None else [RecipeLine("views", data.views, comment)]


def robot_lines(data: DataSummary, inputs: Sequence[str]) -> list[RecipeLine]:
    """Return commented-out lines with examples of the keys that describe the robot of a LeRobot dataset."""
    if data.fps is None:
        return []
    lines = [
        RecipeLine("# fps", data.fps, "recorded; set it and sampling.fps to the rate to generate (docs/robots.md)")
    ]
    if "actions" in inputs:
        lines += [
            RecipeLine("# domain", "droid_lerobot", "the robot; also set inputs: [actions, domain] (docs/robots.md)"),
            RecipeLine("# actions", {"space": "droid"}, "numbers that Cosmos3 was trained on; unset: as stored"),
        ]
    return lines
