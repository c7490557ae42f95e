"""The Cosmos-RL configuration to convert, with the default values of unset keys and notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.errors import RecipeError

SFT, NFT, DDRL, WFM_SFT = "SFT", "DiffusionNFT", "DDRL", "SFT of the wfm mode"
VLM_SFT = "SFT of a vision-language model"
POLICY = "train.train_policy"  # a table


class NoCounterpart(RecipeError):
    """Raised by a converter if no recipe value corresponds to a Cosmos-RL value. The message gives the reason."""


@dataclass(slots=True)
class CosmosConfig:
    """A Cosmos-RL configuration as flat dotted keys.

    settings: keys that the configuration sets. defaults: Cosmos-RL's default values of all other keys. notes: messages
    for the user.
    """

    mode: str
    settings: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: int | None = None  # run length, from --steps

    def __getitem__(self, key: str) -> Any:
        return self.settings[key] if key in self.settings else self.defaults[key]

    def has_table(self, prefix: str) -> bool:
        return any(key.startswith(f"{prefix}.") for key in self.settings)

    def add_note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def model(self) -> str:
        return str(
            self.settings.get("policy.model_name_or_path", self.settings.get("checkpoint.load_path", ""))
        ).lower()


ValueConverter = Callable[[Any, CosmosConfig], Any]


def choice_converter(choices: Mapping[Any, str]) -> Callable[[Any, CosmosConfig], str]:
    """Return a converter that looks up a value in `choices`, and raises NoCounterpart for other values."""

    def convert(value: Any, _: CosmosConfig) -> str:
        if value not in choices:
            raise NoCounterpart(f"{value!r} is not one of {', '.join(map(str, choices))}")
        return choices[value]

    return convert
