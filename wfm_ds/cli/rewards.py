"""`wfm rewards`: list the built-in rewards, or describe one and its options."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from typing import TYPE_CHECKING

from wfm_ds.program import CommandParser

if TYPE_CHECKING:
    from wfm_reward.base import Range, Reward


def parser() -> CommandParser:
    p = CommandParser(
        description="List the built-in rewards, or describe one and its options.", epilog="Example: %(prog)s ocr"
    )
    p.add_argument("name", nargs="?", help="name of a built-in reward, or package.module:Class of your own")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_reward import registry

    if args.name is not None:
        sys.stdout.write(describe_reward(registry.get_reward_class(args.name)))
        return
    rewards = [registry.get_reward_class(name) for name in registry.list_reward_names()]
    width = max(len(reward.name) for reward in rewards) + 2
    for reward in rewards:
        sys.stdout.write(f"{reward.name:{width}}{format_media_types(reward):14}{first_doc_line(reward)}\n")


def format_media_types(reward: type[Reward]) -> str:
    return ", ".join(sorted(reward.media_types))


def first_doc_line(reward: type[Reward]) -> str:
    return (inspect.cleandoc(reward.__doc__ or "")).partition("\n")[0]


def describe_reward(reward: type[Reward]) -> str:
    parameters = reward.option_parameters().values()
    options = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    needs = (
        *reward.required_metadata,
        *reward.required_inputs,
        *(["a recording"] if reward.needs_reference else []),
        *(["sound"] if reward.needs_sound else []),
        *(["a source image"] if reward.sees_images else []),
    )
    rows = {
        "scores": format_media_types(reward),
        "value": reward.primary_output,
        "outputs": ", ".join(f"{name} {format_range(range_)}" for name, range_ in reward.outputs.items()),
        "options": options or "none",
        "needs": ", ".join(needs) or "no metadata or inputs",
        "max batch": f"{reward.max_batch} items",
    }
    body = "".join(f"  {name:11}{text}\n" for name, text in rows.items())
    docstring = inspect.cleandoc(reward.__doc__ or "")
    return f"{reward.name}\n{body}\n{docstring}\n"


def format_range(range_: Range) -> str:
    low = "-inf" if math.isinf(range_.low) else f"{range_.low:g}"
    high = "inf" if math.isinf(range_.high) else f"{range_.high:g}"
    return "unbounded" if math.isinf(range_.low) and math.isinf(range_.high) else f"{low} to {high}"
