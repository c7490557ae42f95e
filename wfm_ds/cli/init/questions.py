"""Numbered questions on the terminal. Without a terminal, each question is answered with its default."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from wfm_ds.errors import UserError

T = TypeVar("T")
TASKS = {  # {task: description}
    "sft": "fine-tune on the images or videos",
    "actions": "fine-tune on videos with their actions",
    "dpo": "learn from preference pairs",
    "rl": "improve a reward",
    "distill": "generate in few steps, without guidance",
    "reasoner": "fine-tune a vision-language model on conversations",
}


@dataclass(slots=True)
class Questions:
    """Asks the user for missing options of a command."""

    can_ask: bool
    has_asked: bool = False

    def choose(
        self, question: str, choices: Mapping[str, str], *, option: str, default: str | None = None, other: str = ""
    ) -> str:
        """Return a key of `choices`, or any other text if `other` is set.

        choices: {answer: its description}. default: answer for an empty input, and without a terminal. If it is None,
        an empty input selects the first choice, and a UserError that names the option is raised without a terminal.
        other: description of what the user may type instead of a number.
        """
        if not self.can_ask:
            return default if default is not None else self._refuse(option)
        width, answers = max(map(len, choices)) + 2, list(choices)
        rows = [f"  {number}  {name:{width}}{text}".rstrip() for number, (name, text) in enumerate(choices.items(), 1)]
        sys.stdout.write("\n".join(["", question, *rows, ""]))
        first = answers[0] if default is None else default
        prompt = f"Number{f', {other}' if other else ''} [{answers.index(first) + 1}]: "
        while True:
            answer = self._read_line(prompt)
            if not answer:
                return first
            if answer.isdecimal() and 1 <= int(answer) <= len(answers):
                return answers[int(answer) - 1]
            if answer in choices or (other and not answer.isdecimal()):
                return answer
            sys.stdout.write(f"{answer!r} is not a number from 1 to {len(answers)}\n")

    def ask_value(self, question: str, parse: Callable[[str], T], *, option: str, default: str = "") -> T:
        """Ask for a value and return parse(answer). Asks again while `parse` raises UserError.

        Without a terminal, the default is used. If there is none, raises a UserError that names the option.
        """
        if not self.can_ask:
            return parse(default or self._refuse(option))
        prompt = f"\n{question}{f' [{default}]' if default else ''}: "
        while True:
            try:
                if answer := self._read_line(prompt) or default:
                    return parse(answer)
            except UserError as error:
                sys.stdout.write(f"{error}\n")

    def _refuse(self, option: str) -> NoReturn:
        raise UserError(f"{option} is missing (see wfm init --help)")

    def _read_line(self, prompt: str) -> str:
        self.has_asked = True
        try:
            return input(prompt).strip()
        except EOFError:
            raise UserError("the terminal was closed before the last question: nothing was written") from None
