"""Base class of all recipe sections, and types for their keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from wfm_ds.seeds import MAX_SEED

MAX_PATH_BYTES = 3500  # Linux allows 4095; leaves room for file names inside a folder
MAX_NAME_BYTES = 255


def require_not_empty(path: Any) -> Any:
    if path == "":
        raise ValueError("is empty: name a folder or file, or . for the working directory")
    return path


def require_possible_path(address: str) -> str:
    """Return `address`. Raises ValueError if it is too long for a file system."""
    if len(os.fsencode(address)) > MAX_PATH_BYTES:
        raise ValueError(f"a path has at most {MAX_PATH_BYTES} bytes, this one has {len(os.fsencode(address))}")
    if any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in address.split("/")):
        raise ValueError(f"a file or folder name has at most {MAX_NAME_BYTES} bytes, one in this path is longer")
    return address


def expand_user(address: str) -> str:
    """Expand a leading ~ in a path. URLs are not changed. Raises ValueError for an unknown user or a too long path."""
    require_possible_path(address)
    try:
        return address if "://" in address else str(Path(address).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{address.split('/')[0]}: this machine has no such user") from error


def require_local_path(path: Path) -> Path:
    """Expand a leading ~ in a path. Raises ValueError for a URL."""
    if len(path.parts) > 1 and path.parts[0].endswith(":"):
        raise ValueError("expected a local path, got an address; only checkpoint.storage takes an s3:// address")
    return Path(expand_user(str(path)))


def check_reward_name(name: str) -> str:
    """Raise ValueError if a reward's name is malformed. Does not check that the reward exists."""
    if not name.isprintable() or not all(part.strip() for part in name.split("/")):
        raise ValueError(f"expected NAME, NAME/LABEL or package.module:Class, got {name!r}")
    return name


def check_device_name(name: str) -> str:
    """Raise ValueError if a torch device's name is malformed. Does not check that the device exists."""
    if not re.fullmatch(r"[a-z]+(:\d+)?", name):
        raise ValueError(f"expected cpu, cuda or cuda:N, got {name!r}")
    return name


def check_hub_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(f"expected owner/name of a Hub repository, got {name!r}")
    return name


def check_storage_address(address: str) -> str:
    bucket = address.removeprefix("s3://").strip("/")
    if not address.startswith("s3://") or not bucket:
        raise ValueError("expected s3://BUCKET/FOLDER; set a local folder in run.output_dir")
    return f"s3://{bucket}"


UserPath = Annotated[Path, BeforeValidator(require_not_empty), AfterValidator(require_local_path)]
UserAddress = Annotated[str, BeforeValidator(require_not_empty), AfterValidator(expand_user)]
"""A local path or a URL."""
PossiblePath = Annotated[str, AfterValidator(require_possible_path)]
"""A path in which ~ is expanded later, or a name such as tiny:sd3."""
RewardName = Annotated[str, AfterValidator(check_reward_name)]
DeviceName = Annotated[str, AfterValidator(check_device_name)]
HubName = Annotated[str, AfterValidator(check_hub_name)]
StorageAddress = Annotated[str, AfterValidator(check_storage_address)]
"""An s3:// address, without a trailing slash, to which a run's files are copied."""
CLASS_PATTERN = r"^[^:\s]+:[^:\s]+$"
UserClass = Annotated[str, Field(pattern=CLASS_PATTERN)]
"""Import path of a user's class: `package.module:Class`."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


def value_form(value: Any) -> str:
    """Return the pydantic tag of the union member that accepts `value`: "mapping", "list" or "scalar"."""
    if isinstance(value, dict | BaseModel):
        return "mapping"
    return "list" if isinstance(value, list | tuple) else "scalar"


class Section(BaseModel):
    """Base class of all recipe sections: immutable; unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # reward.functions.N.options may contain inf
    )

    def non_default_keys(self, *keys: str) -> list[str]:
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default(call_default_factory=True)]

    def require_defaults(self, *keys: str, unless: str) -> None:
        """Raise ValueError if a key has a non-default value. unless: when these keys are used, for the message."""
        if unread := self.non_default_keys(*keys):
            raise ValueError(f"{' and '.join(unread)}: only read with {unless}; remove it")
