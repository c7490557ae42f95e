"""The service's configuration: every key, its meaning, and one clear sentence for what is wrong in a file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from wfm_ds.errors import RewardError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PipesConfig(Section):
    """Where the service listens, and how much it holds."""

    clients: str = "ipc"
    """`ipc` (a socket in `folder`), `ipc:///PATH` or a loopback `tcp://127.0.0.1:PORT` (port 0: any free one)."""
    workers: str = "ipc"
    """The same for its own scorers."""
    folder: Path | None = None
    """Folder for the sockets, with a short path. Unset: a new private one. Removed at the end if empty."""
    file: Path = Path("pipes.json")
    """Written when all rewards are ready; clients read the address here. Relative to the configuration file."""
    spool_mib: PositiveInt = 4096
    """Media held for tasks that wait or are worked on; above it, clients are told to offer them again later."""
    max_waiting: PositiveInt = 20000
    """Tasks that may wait."""


class RewardConfig(Section):
    """One reward."""

    device: str = "cpu"
    """Where its model runs."""
    workers: PositiveInt = 1
    """Processes."""
    max_batch: PositiveInt = Field(16, le=64)
    """Items scored at once."""
    stall_s: PositiveFloat = 120.0
    """Without progress for this long a worker is replaced; its task is tried three times in all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward's constructor."""


class ServiceConfig(Section):
    """A reward service."""

    pipes: PipesConfig = PipesConfig()
    rewards: dict[str, RewardConfig] = Field(min_length=1)

    @field_validator("rewards", mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """`ocr:` with nothing behind it means all defaults."""
        return {name: {} if r is None else r for name, r in value.items()} if isinstance(value, dict) else value


def load_config(path: Path) -> ServiceConfig:
    """Raises RewardError: one sentence with file, key, and the nearest valid key."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RewardError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RewardError(f"{path}: must be a mapping with the sections {', '.join(ServiceConfig.model_fields)}")
    try:
        return ServiceConfig.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_sentence(problem) for problem in error.errors())
        raise RewardError(f"{path}: {problems}") from error


def _sentence(problem: Any) -> str:
    where = [str(part) for part in problem["loc"]]
    if problem["type"] != "extra_forbidden":
        return f"{'.'.join(where)}: {problem['msg']}"
    known = _keys(where[:-1])
    near = difflib.get_close_matches(where[-1], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"{'.'.join(where)} is not a key; {hint}"


def _keys(where: list[str]) -> list[str]:
    """The keys of the section at a place such as ["rewards", "ocr"]."""
    if not where:
        return list(ServiceConfig.model_fields)
    return list(PipesConfig.model_fields if where[0] == "pipes" else RewardConfig.model_fields)
