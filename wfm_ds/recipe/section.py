"""What all sections of the recipe schema share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


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


UserPath = Annotated[Path, AfterValidator(local)]
UserAddress = Annotated[str, AfterValidator(expand_user)]
"""A path on this machine, or a URL."""
StorageAddress = Annotated[str, AfterValidator(storage_address)]
"""An s3:// address below which a run keeps its copies; without a slash at its end."""
UserClass = Annotated[str, Field(pattern=r"^[^:\s]+:[^:\s]+$")]
"""A class of the user's own: `package.module:Class` (user_class.py)."""
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
