"""Load and validate the configuration file of the reward service."""

from __future__ import annotations

import difflib
import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

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
from wfm_ds.storage.filesystem import open_regular, read_regular
from wfm_reward.base import MAX_BATCH

TOKEN_VARIABLE = "WFM_REWARD_TOKEN"


class ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PipesConfig(ConfigSection):
    """Addresses of the reward service, and limits on its queue."""

    clients: str = "ipc"
    """Address for clients: `ipc` (a socket in `folder`), `ipc:///PATH`, or an address of this machine such as
    `tcp://10.0.0.5:6100` (port 0: any free port). `tcp://` requires `keys`."""
    keys: Path | None = None
    """Key folder of the service (made with `wfm keys new DIR hub`). Only clients with a public key in its subfolder
    public/ may connect. Relative to the configuration file."""
    workers: str = "ipc"
    """Address for the workers that the service starts: `ipc` or `ipc:///PATH`."""
    folder: Path | None = None
    """Folder for the sockets. Its path must be short. Unset: a new private folder. The folder is removed on exit if it
    is empty."""
    file: Path = Path("pipes.json")
    """File from which clients read the address. It is written when all rewards are ready. Relative to the configuration
    file."""
    spool_mib: PositiveInt = 4096
    """Memory in MiB for the images and videos of queued and running tasks. If it is full, clients must submit again
    later."""
    max_waiting: PositiveInt = 20000
    """Maximum number of queued tasks of all rewards together."""


class RewardConfig(ConfigSection):
    """Worker processes and options of one reward."""

    device: str = "cpu"
    """Device of the model, such as `cuda:0`. The number counts the GPUs that the service sees
    (CUDA_VISIBLE_DEVICES)."""
    workers: PositiveInt = 1
    """Number of worker processes."""
    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    """Maximum number of items per batch. Unset: 16, or the maximum of the reward's class if that is smaller."""
    max_wait_ms: NonNegativeFloat = 0.0
    """Requests that arrive within this many milliseconds are scored in one batch. 0: each request is a separate batch,
    so scores do not depend on other requests."""
    max_waiting: PositiveInt | None = None
    """Maximum number of queued tasks of this reward. If it is reached, clients must submit again later. Unset:
    pipes.max_waiting."""
    stall_s: PositiveFloat | None = None
    """Seconds without progress after which a worker is replaced. A task is tried at most three times. Unset: the value
    of the reward's class, which is 120 by default and 660 for built-in rewards that call other services."""
    python: Path | None = None
    """Python interpreter of the workers. It needs the packages of the model, and numpy, pyzmq, msgpack and pydantic.
    Unset: the interpreter of the service."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward's constructor."""


class HttpConfig(ConfigSection):
    """Settings of the HTTP server, which offers a status page, metrics, and scores for clients other than wfm_ds."""

    bind: str = "127.0.0.1:8080"
    """HOST:PORT (port 0: any free port). A token is required if HOST is not a loopback address."""
    token_file: Path | None = None
    """File with the token that requests must carry. Only its owner may be able to read it. Unset: the environment
    variable WFM_REWARD_TOKEN. If neither is set, no token is required, and only loopback addresses are allowed.
    Relative to the configuration file."""
    max_body_mib: PositiveInt = 512
    """Maximum size of the body of a request in MiB."""
    body_timeout_s: PositiveFloat = 120.0
    """Seconds within which the body of a request must arrive. Otherwise the reply is 408."""
    idle_timeout_s: PositiveFloat = 30.0
    """Seconds after which a connection without a current request is closed. This happens if the client sends no header
    or does not read the reply."""
    max_connections: PositiveInt = 256
    """Maximum number of open connections. Further connections get 503. The number is at most a quarter of the process's
    file descriptors (`ulimit -n`), because trainers and workers need the rest."""
    max_pending_mib: PositiveInt = 2048
    """Memory in MiB for the bodies and the unscored images and videos of all requests. Latents count with the size of
    their decoded videos. If it is full, a request gets 429. A request that can never fit gets 413."""
    timeout_s: PositiveFloat = 600.0
    """Seconds after which an item without a score fails, even if it is being scored."""
    pull_wait_s: NonNegativeFloat = 4.0
    """Seconds that a pull request waits for scores before the reply says that they are not ready."""
    result_ttl_s: PositiveFloat = 3600.0
    """Seconds for which finished scores remain available to pull requests."""
    failed_value: Literal["nan"] | None = None
    """Score of failed items in replies to pull requests. Unset: null. `nan`: NaN, for clients that accept only
    numbers."""

    @field_validator("bind")
    @classmethod
    def _check_host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{value!r} is not HOST:PORT")
        return value


class DecoderConfig(ConfigSection):
    """The VAE that decodes latents sent by HTTP clients."""

    vae: str
    """Folder of a diffusers VAE, or of a diffusers pipeline that contains one."""
    device: str = "cpu"
    """The device of the VAE."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the VAE's weights and computation."""


class ServiceConfig(ConfigSection):
    """The configuration file of a reward service."""

    pipes: PipesConfig = PipesConfig()
    http: HttpConfig | None = None
    """HTTP server. Unset: no server. `http: {}`: a server with all default values."""
    latent_decoders: dict[PositiveInt, DecoderConfig] = Field(default_factory=dict)
    """{number of latent channels: decoder}. Latents of Wan 2.1 have 16 channels."""
    rewards: dict[str, RewardConfig] = Field(min_length=1)

    @field_validator("http", mode="before")
    @classmethod
    def _fill_empty_http(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("rewards", mode="before")
    @classmethod
    def _fill_empty_rewards(cls, value: Any) -> Any:
        return {name: {} if r is None else r for name, r in value.items()} if isinstance(value, dict) else value


def load_config(path: Path) -> ServiceConfig:
    """Load a configuration file. Raises RewardError that names the file and the key if it is invalid."""
    try:
        content = yaml.safe_load(read_regular(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RewardError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RewardError(f"{path}: must be a mapping with the sections {', '.join(ServiceConfig.model_fields)}")
    try:
        return ServiceConfig.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_format_problem(problem) for problem in error.errors())
        raise RewardError(f"{path}: {problems}") from error


def _format_problem(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    if problem["type"] != "extra_forbidden":
        return f"{'.'.join(location)}: {problem['msg']}"
    known = _section_keys(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"{'.'.join(location)} is not a key; {hint}"


def _section_keys(location: list[str]) -> list[str]:
    if not location:
        return list(ServiceConfig.model_fields)
    sections: dict[str, type[ConfigSection]] = {
        "pipes": PipesConfig,
        "http": HttpConfig,
        "latent_decoders": DecoderConfig,
    }
    return list(sections.get(location[0], RewardConfig).model_fields)


def read_service_token(config: HttpConfig, base: Path, environment: Mapping[str, str]) -> str | None:
    """Return the token that requests must contain, or None if no token is needed.

    Raises RewardError if other machines can reach the server without a token, or other users can read the token file.
    """
    token = environment.get(TOKEN_VARIABLE) or None
    if config.token_file is not None:
        token = _read_token_file(base / config.token_file.expanduser())
    host = config.bind.rpartition(":")[0].strip("[]")
    if token is None and not _is_loopback(host):
        raise RewardError(
            f"http.bind is {config.bind}, which others can reach: set http.token_file, or the variable {TOKEN_VARIABLE}"
        )
    return token


def _read_token_file(path: Path) -> str:
    try:
        with open_regular(path) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise RewardError(f"{path}: others can read this token: chmod 600 {path}")
            token = file.read().decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"http.token_file: {path} cannot be read: {error}") from error
    if not token:
        raise RewardError(f"http.token_file: {path} is empty")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
