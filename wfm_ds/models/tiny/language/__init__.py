"""Tiny random vision-language models. Each module defines one FAMILY and is named after it."""

from __future__ import annotations

import pkgutil

LANGUAGE_FAMILIES = tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg))
