"""A Cosmos-RL configuration while it is read: its keys, what its mode assumes for the others, and what was noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.errors import RecipeError

SFT, NFT, DDRL, WFM_SFT = "SFT", "DiffusionNFT", "DDRL", "SFT of the wfm mode"
VLM_SFT = "SFT of a vision-language model"


class NoCounterpart(RecipeError):
    """A value, of a key that is otherwise known, that no recipe can say; the text is the reason."""


@dataclass(slots=True)
class CosmosConfig:
    """A configuration with flat dotted keys, the defaults of those it lacks, and what was noted while reading it."""

    mode: str
    given: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: int | None = None  # the length of the run, where the user of the command says it

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.defaults[key]

    def has_table(self, prefix: str) -> bool:
        return any(key.startswith(f"{prefix}.") for key in self.given)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def model(self) -> str:
        """The model's name in the configuration, in lower case."""
        return str(self.given.get("policy.model_name_or_path", self.given.get("checkpoint.load_path", ""))).lower()


Convert = Callable[[Any, CosmosConfig], Any]


def one_of(words: Mapping[Any, str]) -> Callable[[Any, CosmosConfig], str]:
    """A choice by name."""

    def convert(value: Any, _: CosmosConfig) -> str:
        if value not in words:
            raise NoCounterpart(f"{value!r} is none of {', '.join(map(str, words))}")
        return words[value]

    return convert
