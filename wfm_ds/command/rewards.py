"""`wfm rewards`: what the built-in rewards measure, and what they take."""

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
        description="List the built-in rewards, or tell what one of them measures and which options it takes.",
        epilog="Example: %(prog)s ocr",
    )
    p.add_argument("name", nargs="?", help="NAME, or package.module:Class of your own")
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
    """The first line of its docstring."""
    return (inspect.getdoc(reward) or "").partition("\n")[0]


def facts(reward: type[Reward]) -> str:
    """Everything that its class states, a line each."""
    parameters = reward.options().values()
    given = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    rows = {
        "scores": media(reward),
        "value": reward.primary,
        "outputs": ", ".join(f"{name} {limits(range_)}" for name, range_ in reward.outputs.items()),
        "options": given or "none",
        "needs": ", ".join((*reward.needs, *reward.needs_inputs)) or "nothing in a prompt's metadata",
        "at once": f"{reward.max_batch} items at most",
    }
    body = "".join(f"  {name:9}{text}\n" for name, text in rows.items())
    about = inspect.getdoc(reward) or ""
    return f"{reward.name}\n{body}\n{about}\n"


def limits(range_: Range) -> str:
    low = "below" if math.isinf(range_.low) else f"{range_.low:g}"
    high = "above" if math.isinf(range_.high) else f"{range_.high:g}"
    return "without limits" if math.isinf(range_.low) and math.isinf(range_.high) else f"{low} to {high}"
