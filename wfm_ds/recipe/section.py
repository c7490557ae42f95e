"""What all sections of the recipe schema share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_PATH = 4095  # characters, of Linux


def sized(path: Any) -> Any:
    """A path becomes the working directory if it is empty, and an error of the system wherever it is used if it is too
    long."""
    text = str(path) if isinstance(path, str | Path) else "."
    if not text:
        raise ValueError("is empty: name a folder or file, or . for the working directory")
    if len(text) > MAX_PATH:
        raise ValueError(f"has {len(text):,} characters, a path has at most {MAX_PATH:,}")
    return path


def expand_user(address: str) -> str:
    return address if "://" in address else str(Path(address).expanduser())


def local(path: Path) -> Path:
    """What a Path makes of s3://bucket/run is a local folder s3:/bucket/run, which nobody means."""
    if len(path.parts) > 1 and path.parts[0].endswith(":"):
        raise ValueError("expected a path on this machine, got an address; checkpoint.storage takes an s3:// address")
    return path.expanduser()


def storage_address(address: str) -> str:
    bucket = address.removeprefix("s3://").strip("/")
    if not address.startswith("s3://") or not bucket:
        raise ValueError("expected s3://BUCKET/FOLDER; a folder of this machine is set in run.output_dir")
    return f"s3://{bucket}"


UserPath = Annotated[Path, BeforeValidator(sized), AfterValidator(local)]
UserAddress = Annotated[str, BeforeValidator(sized), AfterValidator(expand_user)]
"""A path on this machine, or a URL."""
StorageAddress = Annotated[str, AfterValidator(storage_address)]
"""An s3:// address below which a run keeps its copies; without a slash at its end."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict and frozen: an unknown key or a wrong type is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    def changed(self, *keys: str) -> list[str]:
        """Those of these keys that have another value than their default: a resolved recipe names all keys."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]

    def require_default(self, *keys: str, unless: str) -> None:
        """ValueError if one of these keys is set, which nothing reads unless what `unless` says holds."""
        if unread := self.changed(*keys):
            raise ValueError(f"{' and '.join(unread)}: only read with {unless}; remove it")
