"""Tiny random vision-language models: a module of this folder is one and its name the FAMILY."""

from __future__ import annotations

import pkgutil

LANGUAGE_FAMILIES = tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg))
