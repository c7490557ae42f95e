"""Token authentication of the HTTP server: `Authorization: Bearer`, or the password of HTTP Basic in browsers."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from wfm_ds.errors import RewardError
from wfm_reward.config import HttpConfig
from wfm_reward.web.http_problem import HttpProblem

TOKEN_VARIABLE = "WFM_REWARD_TOKEN"


def read_service_token(config: HttpConfig, base: Path, environment: Mapping[str, str]) -> str | None:
    """Return the token that requests must contain, or None if no token is needed.

    Raises RewardError if other machines can reach the server and no token is set, or if other users can read the token
    file.
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
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise RewardError(f"{path}: others can read this token: chmod 600 {path}")
            token = file.read().strip()
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


def check_token(header: str | None, token: str | None) -> None:
    """Raise HttpProblem 401 unless the Authorization header has the token. Compares in constant time."""
    if token is None:
        return
    scheme, _, credentials = (header or "").partition(" ")
    if scheme.lower() == "basic":
        try:
            credentials = base64.b64decode(credentials, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            credentials = ""
    elif scheme.lower() != "bearer":
        credentials = ""
    # aiohttp passes bytes that are not UTF-8 as surrogates.
    if not hmac.compare_digest(credentials.strip().encode(errors="surrogateescape"), token.encode()):
        detail = "the token is wrong" if header else "a token is needed: send the header Authorization: Bearer TOKEN"
        raise HttpProblem(401, "unauthorized", detail)
