"""`wfm rewards`: list the built-in rewards, or describe one and its options."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from typing import TYPE_CHECKING

from wfm_ds.program import Parser

if TYPE_CHECKING:
    from wfm_reward.base import Range, Reward


def parser() -> Parser:
    p = Parser(
        prog="wfm rewards",
        description="List the built-in rewards, or describe one and its options.",
        epilog="Example: %(prog)s ocr",
    )
    p.add_argument("name", nargs="?", help="name of a built-in reward, or package.module:Class of your own")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_reward import registry

    if args.name is not None:
        sys.stdout.write(facts(registry.describe(args.name)))
        return
    rewards = [registry.describe(name) for name in registry.names()]
    width = max(len(reward.name) for reward in rewards) + 2
    for reward in rewards:
        sys.stdout.write(f"{reward.name:{width}}{media(reward):14}{summary(reward)}\n")


def media(reward: type[Reward]) -> str:
    return ", ".join(sorted(reward.media))


def summary(reward: type[Reward]) -> str:
    """Return the first line of the docstring."""
    return (inspect.getdoc(reward) or "").partition("\n")[0]


def facts(reward: type[Reward]) -> str:
    """Return the properties of a reward, one per line, and its docstring."""
    parameters = reward.options().values()
    options = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    rows = {
        "scores": media(reward),
        "value": reward.primary,
        "outputs": ", ".join(f"{name} {limits(range_)}" for name, range_ in reward.outputs.items()),
        "options": options or "none",
        "needs": ", ".join((*reward.needs, *reward.needs_inputs)) or "no metadata or inputs",
        "max batch": f"{reward.max_batch} items",
    }
    body = "".join(f"  {name:11}{text}\n" for name, text in rows.items())
    docstring = inspect.getdoc(reward) or ""
    return f"{reward.name}\n{body}\n{docstring}\n"


def limits(range_: Range) -> str:
    low = "-inf" if math.isinf(range_.low) else f"{range_.low:g}"
    high = "inf" if math.isinf(range_.high) else f"{range_.high:g}"
    return "unbounded" if math.isinf(range_.low) and math.isinf(range_.high) else f"{low} to {high}"
