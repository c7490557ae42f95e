"""CURVE keys, with which sockets encrypt and know each other. `python -m wfm_ds.pipes.keys new DIR NAME` makes a pair.

A folder of keys holds DIR/NAME.key_secret, readable by its owner alone, and DIR/public/NAME.key. A hub's folder has
hub.key_secret, and in public/ the keys of those who may connect; a peer's has one other secret, and public/hub.key.
Whoever holds the hub's own secret may connect with it too: the processes on the hub's side need no keys of theirs. The
files are those of pyzmq.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from wfm_ds.errors import UserError
from wfm_ds.pipes.throttle import Throttle
from wfm_ds.program import program

log = logging.getLogger(__name__)

HUB = "hub"
SECRET, PUBLIC = ".key_secret", ".key"


class KeyFileError(UserError):
    """A key file is missing, readable by others, or not a key."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A peer's own pair, and the public key of the hub that it means to reach."""

    public: bytes
    secret: bytes = field(repr=False)
    hub: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True)
class HubKeys:
    """A hub's own pair, and who may connect."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Callable[[bytes], bool]

    @property
    def insider(self) -> ClientKeys:
        """The keys of processes on the hub's own side, which may always connect."""
        return ClientKeys(self.public, self.secret, self.public, HUB)


def hub_keys(folder: Path) -> HubKeys:
    """The keys of a hub. Those in public/ are read at each connection: add or remove files at any time.

    Raises KeyFileError, also for a file in public/ that is not a key. One that is damaged later is logged and ignored.
    """
    public, secret = _pair(folder / f"{HUB}{SECRET}")
    for path in _listed(folder):
        _public(path)

    complaints = Throttle(log.warning)  # the folder is read at each handshake, and anybody may try one

    def allowed(key: bytes) -> bool:
        """Never raises: it is called by the thread on which every handshake depends."""
        return key == public or key in _readable(folder, complaints)

    return HubKeys(public, secret, allowed)


def _listed(folder: Path) -> list[Path]:
    return [path for path in (folder / "public").glob(f"*{PUBLIC}") if path.stem != HUB]


def _readable(folder: Path, complaints: Throttle) -> set[bytes]:
    """The public keys that can be read at this moment: a file may be half copied, or just have been removed."""
    keys = set()
    try:
        for path in _listed(folder):
            try:
                keys.add(_public(path))
            except KeyFileError as error:
                complaints.tell(path.name, f"passed over: {error}", time.monotonic())
    except OSError as error:
        complaints.tell("list", f"{folder / 'public'} cannot be listed: {error}", time.monotonic())
    return keys


def client_keys(folder: Path) -> ClientKeys:
    """The keys of a client or a worker; in a hub's folder, the hub's own. Raises KeyFileError."""
    secrets = [path for path in folder.glob(f"*{SECRET}") if path.name != f"{HUB}{SECRET}"]
    if not secrets and (folder / f"{HUB}{SECRET}").exists():
        return hub_keys(folder).insider
    if len(secrets) != 1:
        found = ", ".join(sorted(path.name for path in secrets)) or "none"
        raise KeyFileError(
            f"{folder}: one key of a client is needed, NAME{SECRET}; found {found}. Make one by "
            f"`python -m wfm_ds.pipes.keys new {folder} NAME`"
        )
    public, secret = _pair(secrets[0])
    return ClientKeys(public, secret, _public(folder / "public" / f"{HUB}{PUBLIC}"), secrets[0].stem)


def new(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair: (secret file, public file). Raises KeyFileError if one of that name is there."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise KeyFileError(f"{name!r} is not a name for a key: use letters, digits, - and _")
    secret_file, public_file = folder / f"{name}{SECRET}", folder / "public" / f"{name}{PUBLIC}"
    public, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        public_file.parent.mkdir(exist_ok=True)
        for file in (secret_file, public_file):  # of both, before one of them is written
            if file.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
        _write(
            secret_file, f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n', 0o600
        )
        _write(public_file, f'curve\n    public-key = "{public.decode()}"\n', 0o644)
    except FileExistsError as error:
        raise KeyFileError(f"{error.filename} is there already: choose another name, or remove it first") from error
    except OSError as error:
        raise KeyFileError(f"{folder}: cannot write: {error}") from error
    return secret_file, public_file


def _write(path: Path, text: str, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(text)


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise KeyFileError(f"{path} holds no secret key")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise KeyFileError(f"{path}: others can read this secret (mode {mode:04o}): chmod 600 it, or make a new one")
    return public, secret


def _public(path: Path) -> bytes:
    return _load(path)[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:  # IndexError: pyzmq's, for a line without its =
        raise KeyFileError(f"{path} cannot be read as a key: {error}") from error
    if len(public) != 40 or (secret is not None and len(secret) != 40):
        raise KeyFileError(f"{path} cannot be read as a key: keys have 40 characters")
    return public, secret


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm_ds.pipes.keys", description="Keys of hubs, clients and workers.")
    p.add_argument("command", choices=["new"], help="make a pair of keys")
    p.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there")
    p.add_argument("name", metavar="NAME", help=f"{HUB} for a hub; any other for a client or worker")
    return p


def run(args: argparse.Namespace) -> None:
    secret, public = new(args.folder, args.name)
    sys.stdout.write(f"secret: {secret} (keep it on this machine)\npublic: {public} (copy it to those who need it)\n")


if __name__ == "__main__":
    sys.exit(main())
