"""Checks tiny models and local model folders without importing torch or diffusers."""

from __future__ import annotations

import os
from pathlib import Path

from wfm_ds.errors import ModelError
from wfm_ds.models import tiny
from wfm_ds.models.assets import hub
from wfm_ds.recipe.tiny import TINY_PREFIX
from wfm_ds.storage.filesystem import is_repo_id, read_regular

CONFIG_FILE = "config.json"


def require_local_model(path: str, *, is_language_model: bool) -> None:
    """Raise ModelError if a tiny model or local folder does not exist or is not the required kind of model.

    is_language_model: require a vision-language model instead of a pipeline. Hub repositories are not checked.
    """
    if is_repo_id(path):
        return
    if path.startswith(TINY_PREFIX):
        require_tiny_name(path, is_language_model=is_language_model)
    elif is_language_model:
        require_language_folder(path)
    else:
        require_pipeline_index(path)


def require_tiny_name(path: str, *, is_language_model: bool) -> None:
    """Raise ModelError unless `path` names a tiny pipeline or, with is_language_model, a tiny vision-language model."""
    name = path.removeprefix(TINY_PREFIX)
    if is_language_model:
        if name not in tiny.LANGUAGE_FAMILIES:
            families = ", ".join(tiny.LANGUAGE_FAMILIES)
            raise ModelError(f"{name} is not a tiny vision-language model; use one of {families}")
    elif name in tiny.LANGUAGE_FAMILIES:
        raise ModelError(f"{path} {hub.LANGUAGE_ADVICE}")
    else:
        tiny.require_pipeline_family(name)


def require_pipeline_index(path: str | Path) -> Path:
    """Return the path of a local folder with a model_index.json. Raises ModelError for any other path."""
    folder = hub.require_pipeline_folder(path)
    if os.path.isfile(folder / hub.INDEX):
        return folder
    config = folder / CONFIG_FILE
    try:
        is_language_model = os.path.isfile(config) and b'"vision_config"' in read_regular(config)
    except OSError as error:
        raise ModelError(f"{config} cannot be read ({error.strerror}); copy or download the model again") from error
    if is_language_model:
        raise ModelError(f"{folder} {hub.LANGUAGE_ADVICE}")
    raise ModelError(f"{folder} has no {hub.INDEX}; model.path must be the top folder of a diffusers pipeline")


def require_language_folder(path: str | Path) -> Path:
    """Return the path of a local folder with a config.json. Raises ModelError for any other path."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{folder} has no {CONFIG_FILE}; model.path must be the folder of a vision-language model, owner/name on "
            "the Hub, or tiny:qwen25vl"
        )
    return folder
