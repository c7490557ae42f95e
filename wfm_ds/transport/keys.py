"""CURVE keys that encrypt and authenticate connections. `wfm keys new DIR NAME` creates a key pair in pyzmq's format.

A key folder DIR contains the secret key DIR/NAME.key_secret, readable only by its owner, and public keys in DIR/public.
The broker's folder contains hub.key_secret and the public keys of all peers that may connect. A peer's folder contains
the peer's secret key and public/hub.key. Processes on the broker's machine may use the broker's keys.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from wfm_ds.errors import UserError
from wfm_ds.transport.throttle import get_throttled_logger

# Throttled, because anyone can start a handshake, and each handshake reads the key folder and may log warnings.
peer_log = get_throttled_logger(f"{__name__}.peers")

BROKER_NAME = "hub"
SECRET_SUFFIX, PUBLIC_SUFFIX = ".key_secret", ".key"


class KeyFileError(UserError):
    """Raised if a key file is missing, can be read by other users, or is not a key."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A peer's key pair, and the public key of its broker."""

    public: bytes
    secret: bytes = field(repr=False)
    broker: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """The broker's key pair, and a function that checks whether a public key is allowed."""

    public: bytes
    secret: bytes = field(repr=False)
    is_allowed: Callable[[bytes], bool]

    @property
    def local_client_keys(self) -> ClientKeys:
        """Return the broker's own keys, for a process on its machine. Peers with these keys may always connect."""
        return ClientKeys(self.public, self.secret, self.public, BROKER_NAME)


def load_broker_keys(folder: Path) -> BrokerKeys:
    """Load the broker's keys. Public keys are read again at each connection, so files may be added or removed.

    Raises KeyFileError if a file is missing, if a file in public/ is not a key, or if others can write to the folder.
    """
    _check_writers(folder)
    public, secret = _load_pair(folder / f"{BROKER_NAME}{SECRET_SUFFIX}")
    for path in _list_public_files(folder):
        _load_certificate(path)

    def is_allowed(key: bytes) -> bool:  # must not raise: that would end the thread that handles all connections
        return key == public or key in _read_public_keys(folder)

    return BrokerKeys(public, secret, is_allowed)


def _list_public_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "public").glob(f"*{PUBLIC_SUFFIX}") if path.stem != BROKER_NAME]


def _read_public_keys(folder: Path) -> set[bytes]:
    keys = set()
    try:
        for path in _list_public_files(folder):
            try:
                keys.add(_load_certificate(path)[0])
            except KeyFileError as error:
                peer_log.warning(f"ignored: {error}")  # one line a minute for each file
    except OSError as error:
        peer_log.warning("%s cannot be listed: %s", folder / "public", error)
    return keys


def load_client_keys(folder: Path) -> ClientKeys:
    """Load a peer's key pair, or the broker's from its folder. Raises KeyFileError if the keys cannot be loaded."""
    _check_writers(folder)
    secrets = [path for path in folder.glob(f"*{SECRET_SUFFIX}") if path.name != f"{BROKER_NAME}{SECRET_SUFFIX}"]
    if not secrets and (folder / f"{BROKER_NAME}{SECRET_SUFFIX}").exists():
        return load_broker_keys(folder).local_client_keys
    if len(secrets) != 1:
        names = ", ".join(sorted(path.name for path in secrets)) or "none"
        raise KeyFileError(
            f"{folder}: expected exactly one client key NAME{SECRET_SUFFIX}, found {names}. Create one: "
            f"wfm keys new {folder} NAME"
        )
    public, secret = _load_pair(secrets[0])
    broker, _ = _load_certificate(folder / "public" / f"{BROKER_NAME}{PUBLIC_SUFFIX}")
    return ClientKeys(public, secret, broker, secrets[0].stem)


def create_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Create a key pair. Returns its secret and public file. Raises KeyFileError if the name is invalid or in use."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise KeyFileError(f"{name!r} is not a valid key name: use letters, digits, - and _")
    secret_file, public_file = folder / f"{name}{SECRET_SUFFIX}", folder / "public" / f"{name}{PUBLIC_SUFFIX}"
    public, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        public_file.parent.mkdir(mode=0o755, exist_ok=True)
        for file in (secret_file, public_file):  # check both before writing either
            if file.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
        _write_new_file(
            secret_file, f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n', 0o600
        )
        _write_new_file(public_file, f'curve\n    public-key = "{public.decode()}"\n', 0o644)
    except FileExistsError as error:
        raise KeyFileError(f"{error.filename} already exists: choose another name or remove it") from error
    except OSError as error:
        raise KeyFileError(f"{folder}: cannot write: {error}") from error
    return secret_file, public_file


def _write_new_file(path: Path, text: str, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)  # independent of the umask
        file.write(text)


def _check_writers(folder: Path) -> None:
    """Raise KeyFileError if other users can write to a key folder."""
    for path in (folder, folder / "public"):
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else 0
        if mode & 0o022:
            raise KeyFileError(f"{path}: others can write keys here (mode {mode:04o}): chmod go-w {path}")


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load_certificate(path)
    if secret is None:
        raise KeyFileError(f"{path} has no secret key")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise KeyFileError(f"{path}: others can read this secret (mode {mode:04o}): chmod 600 it, or create a new one")
    return public, secret


def _load_certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:  # IndexError: pyzmq, for a line without =
        raise KeyFileError(f"{path} cannot be read as a key: {error}") from error
    if len(public) != 40 or (secret is not None and len(secret) != 40):
        raise KeyFileError(f"{path} cannot be read as a key: keys have 40 characters")
    return public, secret


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm keys", description="Create keys of brokers, clients and workers.")
    p.add_argument("command", choices=["new"], help="create a key pair")
    p.add_argument("folder", type=Path, metavar="DIR", help="created if it does not exist")
    p.add_argument("name", metavar="NAME", help=f"{BROKER_NAME} for the broker; any other name for a client or worker")
    return p


def run(args: argparse.Namespace) -> None:
    secret, public = create_key_pair(args.folder, args.name)
    sys.stdout.write(f"secret: {secret} (keep it on this machine)\npublic: {public} (copy it to the peers)\n")
