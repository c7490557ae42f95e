"""The service's configuration: every key, its meaning, and one clear sentence for what is wrong in a file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from wfm_ds.errors import RewardError
from wfm_reward.base import MAX_BATCH


class ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PipesConfig(ConfigSection):
    """Addresses of the service, and how much it holds."""

    clients: str = "ipc"
    """`ipc` (a socket in `folder`), `ipc:///PATH` or a loopback `tcp://127.0.0.1:PORT` (port 0: any free one). With
    `keys` also another address of this machine, such as `tcp://10.0.0.5:6100`."""
    keys: Path | None = None
    """Folder of keys (python -m wfm_ds.pipes.keys new DIR hub): clients must have one that is in its public/. Relative
    to the configuration file."""
    workers: str = "ipc"
    """The same for its own scorers."""
    folder: Path | None = None
    """Folder for the sockets, with a short path. Unset: a new private one. Removed at the end if empty."""
    file: Path = Path("pipes.json")
    """Written when all rewards are ready; clients read the address here. Relative to the configuration file."""
    spool_mib: PositiveInt = 4096
    """Media held for tasks that wait or are worked on; above it, clients are told to offer them again later."""
    max_waiting: PositiveInt = 20000
    """Tasks that may wait, of all rewards together."""


class RewardConfig(ConfigSection):
    """One reward."""

    device: str = "cpu"
    """Device of its model."""
    workers: PositiveInt = 1
    """Processes."""
    max_batch: PositiveInt = Field(16, le=MAX_BATCH)
    """Items scored at once."""
    max_wait_ms: NonNegativeFloat = 0.0
    """Requests that arrive within this time are scored in one batch. 0: each by itself, so that a score does not depend
    on what else is asked."""
    max_waiting: PositiveInt | None = None
    """Tasks of this reward that may wait; above it, clients are told to offer them again later. Unset:
    pipes.max_waiting."""
    stall_s: PositiveFloat | None = None
    """Seconds without progress after which a worker is replaced; its task is tried three times in all. Unset: 120, and
    660 for rewards that ask other services."""
    python: Path | None = None
    """The Python that runs its workers, with the packages of its model, numpy, pyzmq and msgpack. Unset: the service's
    own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward's constructor."""


class HttpConfig(ConfigSection):
    """The HTTP port: status page, metrics, and scores for other programs."""

    bind: str = "127.0.0.1:8080"
    """HOST:PORT (port 0: any free one). Another host than loopback needs a token."""
    token_file: Path | None = None
    """A file, readable by its owner alone, with the token that requests must bear. Unset: the environment variable
    WFM_REWARD_TOKEN. Neither: no token, on loopback only. Relative to the configuration file."""
    max_body_mib: PositiveInt = 512
    """The largest body of one request."""
    body_timeout_s: PositiveFloat = 120.0
    """A body that is not there after this long is refused with 408."""
    idle_timeout_s: PositiveFloat = 30.0
    """A connection without a request in hand is cut off after this long: one that sends no header, or reads no answer.
    """
    max_connections: PositiveInt = 256
    """Open connections; a further one is answered 503. At most a quarter of the process's file descriptors
    (`ulimit -n`): the others are for trainers and workers."""
    max_pending_mib: PositiveInt = 2048
    """Bodies as they arrive and media that are not scored yet, of all requests together; latents count with the
    videos that they become. Above it, requests are refused with 429, and with 413 one that does not fit by itself."""
    timeout_s: PositiveFloat = 600.0
    """An item without a score after this long has failed, whatever is done with it at that time."""
    pull_wait_s: NonNegativeFloat = 4.0
    """Seconds that a pull waits before it answers that the scores are not there yet."""
    result_ttl_s: PositiveFloat = 3600.0
    """Seconds for which scores are kept to be pulled."""
    failed_value: Literal["nan"] | None = None
    """The score of a failed item in a pull's answer: null, or NaN for clients that take numbers alone."""

    @field_validator("bind")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{value!r} is not HOST:PORT")
        return value


class DecoderConfig(ConfigSection):
    """A decoder of the latents that HTTP clients send."""

    vae: str
    """Folder of the VAE, or of a diffusers pipeline with one."""
    device: str = "cpu"
    """Device of the VAE."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type that it computes in."""


class ServiceConfig(ConfigSection):
    """A reward service."""

    pipes: PipesConfig = PipesConfig()
    http: HttpConfig | None = None
    """Unset: no HTTP port. `http: {}`: one with all defaults."""
    latent_decoders: dict[PositiveInt, DecoderConfig] = Field(default_factory=dict)
    """Decoders by the latents' number of channels, such as 16 for Wan 2.1."""
    rewards: dict[str, RewardConfig] = Field(min_length=1)

    @field_validator("http", mode="before")
    @classmethod
    def _empty_is_on(cls, value: Any) -> Any:
        """`http:` with nothing behind it means all defaults, as `ocr:` does."""
        return {} if value is None else value

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
    sections: dict[str, type[ConfigSection]] = {
        "pipes": PipesConfig,
        "http": HttpConfig,
        "latent_decoders": DecoderConfig,
    }
    return list(sections.get(where[0], RewardConfig).model_fields)
