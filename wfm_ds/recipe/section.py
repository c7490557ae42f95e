"""The base class of all sections of the recipe schema, and the types of their keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_PATH_BYTES = 3500  # Linux takes 4095; the rest is for what stands below a folder
MAX_NAME_BYTES = 255


def not_empty(path: Any) -> Any:
    """Return the path as it is given. Raises ValueError for an empty one, which would be the working directory."""
    if path == "":
        raise ValueError("is empty: name a folder or file, or . for the working directory")
    return path


def possible(address: str) -> str:
    """The address, if a file system could hold a path of this length."""
    if len(os.fsencode(address)) > MAX_PATH_BYTES:
        raise ValueError(f"a path has at most {MAX_PATH_BYTES} bytes, this one has {len(os.fsencode(address))}")
    if any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in address.split("/")):
        raise ValueError(f"a file or folder has a name of at most {MAX_NAME_BYTES} bytes, one in this path is longer")
    return address


def expand_user(address: str) -> str:
    """The address with a leading ~ or ~NAME replaced by that user's home folder. Raises ValueError if there is none."""
    possible(address)
    try:
        return address if "://" in address else str(Path(address).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{address.split('/')[0]} is the home of no user of this machine") from error


def local(path: Path) -> Path:
    """The path with its home folder written out. Raises ValueError for an address: s3://bucket/run would be a local
    folder s3:/bucket/run, which nobody means."""
    if len(path.parts) > 1 and path.parts[0].endswith(":"):
        raise ValueError("expected a path on this machine, got an address; checkpoint.storage takes an s3:// address")
    return Path(expand_user(str(path)))


def reward_name(name: str) -> str:
    """A reward's name; the reward itself is looked up later."""
    if not name.isprintable() or not all(part.strip() for part in name.split("/")):
        raise ValueError(f"expected NAME, NAME/LABEL or package.module:Class, got {name!r}")
    return name


def hub_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(f"expected owner/name of a repository of the hub, got {name!r}")
    return name


def storage_address(address: str) -> str:
    bucket = address.removeprefix("s3://").strip("/")
    if not address.startswith("s3://") or not bucket:
        raise ValueError("expected s3://BUCKET/FOLDER; a folder of this machine is set in run.output_dir")
    return f"s3://{bucket}"


UserPath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(local)]
UserAddress = Annotated[str, BeforeValidator(not_empty), AfterValidator(expand_user)]
"""A path on this machine, or a URL."""
PossiblePath = Annotated[str, AfterValidator(possible)]
"""A path that is expanded elsewhere, or a name in its place such as tiny:sd3."""
RewardName = Annotated[str, AfterValidator(reward_name)]
HubName = Annotated[str, AfterValidator(hub_name)]
StorageAddress = Annotated[str, AfterValidator(storage_address)]
"""An s3:// address below which a run keeps its copies; without a slash at its end."""
UserClass = Annotated[str, Field(pattern=r"^[^:\s]+:[^:\s]+$")]
"""A class of the user's own: `package.module:Class` (user_class.py)."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict and frozen: an unknown key or a wrong type is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in a reward's options, which are not read here
    )

    def changed(self, *keys: str) -> list[str]:
        """List those of these keys that have another value than their default: a resolved recipe names all keys."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default(call_default_factory=True)]

    def require_default(self, *keys: str, unless: str) -> None:
        """ValueError if one of these keys is set, which nothing reads unless what `unless` says holds."""
        if unread := self.changed(*keys):
            raise ValueError(f"{' and '.join(unread)}: only read with {unless}; remove it")
