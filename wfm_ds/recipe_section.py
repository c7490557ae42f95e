"""What all sections of the recipe schema share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def expand_user(address: str) -> str:
    return address if "://" in address else str(Path(address).expanduser())


UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
UserAddress = Annotated[str, AfterValidator(expand_user)]
"""A path on this machine, or a URL."""
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
