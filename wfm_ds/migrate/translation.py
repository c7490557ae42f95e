"""Convert a Cosmos-RL configuration of a diffusion or vision-language model to a recipe.

Comments in the recipe give the reasons for keys that cannot be converted.
"""

from __future__ import annotations

import tempfile
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wfm_ds.errors import RecipeError
from wfm_ds.migrate.config import DDRL, NFT, POLICY, SFT, VLM_SFT, WFM_SFT, CosmosConfig, NoCounterpart
from wfm_ds.migrate.keys import (
    ABSENT,
    KEY_MAPPINGS,
    MODE_SETTINGS,
    MOVED_TABLES,
    RENAMED_KEYS,
    WHOLE_TABLES,
    KeyMapping,
)
from wfm_ds.migrate.language_values import ANNOTATIONS
from wfm_ds.migrate.unsupported_keys import find_reason
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import MAX_CHARACTERS, flatten_keys, shorten_text, to_yaml

REQUIRED = {
    "run.steps": "number of optimizer steps (SFT) or RL steps; set by --steps",
    "run.output_dir": "the output folder",
    "model.path": "the folder of a diffusers pipeline",
    "data.path": "the folder of the training data",
    "sampling.height": "pixels",
    "sampling.width": "pixels",
}
REQUIRED_FOR_LANGUAGE = {
    "model.path": "the folder of a vision-language model",
    "data.path": "the annotations, a .json or .jsonl file, a folder, or a list of these",
}
REQUIRED_FOR_RL = {"reward.functions": "the rewards, e.g. [{name: ocr}]"}


@dataclass(slots=True)
class Migration:
    """The recipe as {dotted key: value}, and the configuration's keys that were renamed or could not be converted."""

    mode: str
    values: dict[str, Any]
    missing: dict[str, str] = field(default_factory=dict)  # recipe key -> description
    renamed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)  # Cosmos-RL key -> reason
    unknown: list[str] = field(default_factory=list)


def render_key_table() -> str:
    lines = [f"| `{row.cosmos_key}` | {' '.join(f'`{key}`' for key in row.targets)} |" for row in KEY_MAPPINGS]
    return "\n".join(["| Cosmos-RL | recipe |", "|---|---|", *dict.fromkeys(lines)]) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)  # limited: the path may be a device that never ends
        if len(text) > MAX_CHARACTERS:
            raise RecipeError(f"{path}: not a Cosmos-RL configuration: it has more than {MAX_CHARACTERS:,} characters")
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{path}: not valid TOML: {shorten_text(str(error))}") from error


def migrate_config(config: Mapping[str, Any], *, steps: int | None = None) -> Migration:
    """Convert a configuration. steps: length of the run; if set, it replaces the length in the configuration.

    Raises RecipeError if the kind of model or training is not supported, if a value has the wrong type, or if a key is
    set under both its old and its new name.
    """
    try:
        settings, renamed = rename_old_keys(flatten_keys(config, whole=WHOLE_TABLES))
    except RecursionError as error:
        raise RecipeError("the configuration is nested too deeply") from error
    mode = detect_mode(settings)
    rows = [row for row in KEY_MAPPINGS if mode in row.modes]
    defaults = {row.cosmos_key: row.default for row in rows if row.default is not ABSENT}
    source = CosmosConfig(mode, settings, defaults, steps=steps)
    migration = Migration(mode, dict(MODE_SETTINGS[mode]), renamed=renamed, notes=source.notes)
    if steps is not None:
        source.add_note(f"run.steps {steps} is from --steps and overrides the configuration")
    for row in rows:
        if row.cosmos_key not in settings and should_apply_default(row, source):
            apply_mapping(row, row.default, source, migration)
    # Explicit values override defaults of other keys with the same recipe key.
    explicit = [row for row in rows if row.cosmos_key in settings]
    used = [row.cosmos_key for row in explicit if apply_mapping(row, settings[row.cosmos_key], source, migration)]
    migration.unsupported = {key: reason for key, reason in migration.unsupported.items() if key not in used}
    for key in settings.keys() - {row.cosmos_key for row in rows}:
        others = sorted({other for row in KEY_MAPPINGS if row.cosmos_key == key for other in row.modes})
        reason = find_reason(key, mode) or (f"used by {' and '.join(others)}, not by {mode}" if others else None)
        if reason is None:
            migration.unknown.append(key)
        else:
            migration.unsupported[key] = reason
    order = {key: index for index, row in enumerate(rows) for key in row.targets}
    migration.values = dict(sorted(migration.values.items(), key=lambda item: order.get(item[0], -1)))
    migration.missing = {key: what for key, what in list_required_keys(mode).items() if key not in migration.values}
    return migration


def list_required_keys(mode: str) -> dict[str, str]:
    if mode == VLM_SFT:
        without_sampling = {key: what for key, what in REQUIRED.items() if not key.startswith("sampling.")}
        return without_sampling | REQUIRED_FOR_LANGUAGE
    return REQUIRED | (REQUIRED_FOR_RL if mode in (NFT, DDRL) else {})


def rename_old_keys(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (settings with current key names, messages). Raises RecipeError if a key is set under two names."""
    current: dict[str, Any] = {}
    messages: list[str] = []
    for name, value in settings.items():
        key = name
        for old, new in MOVED_TABLES.items():
            if key.startswith(f"{old}."):
                key = f"{new}{key.removeprefix(old)}"
        if key != name:
            messages.append(f"{name} is called {key} in current versions")
        if key in RENAMED_KEYS:
            current_key, consequence = RENAMED_KEYS[key]
            messages.append(f"{key} is read as {current_key}: {consequence}")
            key = current_key
        if key in current:
            raise RecipeError(f"{name}: {key} is set twice under different names; remove one of them")
        current[key] = value
    return current, messages


def detect_mode(settings: Mapping[str, Any]) -> str:
    tables = {key.partition(".")[0] for key in settings}
    if tables & {"model", "trainer", "dataloader_train"}:
        return DDRL if settings.get("model.rl.enabled", True) else WFM_SFT
    is_diffusers = settings.get("policy.is_diffusers", any(key.startswith("policy.diffusers.") for key in settings))
    kind = settings.get(f"{POLICY}.type", "grpo" if f"{POLICY}.kl_beta" in settings else "sft")
    trainer = settings.get(f"{POLICY}.trainer_type", "sft" if kind == "sft" else "grpo")
    if not is_diffusers and kind == "sft" and is_vision_model(settings):
        return VLM_SFT
    if not is_diffusers:
        raise RecipeError(
            "the configuration trains no diffusion model: policy.is_diffusers is not true. For language models, only "
            f"SFT on LLaVA annotations is supported ({ANNOTATIONS}, {POLICY}.type sft)"
        )
    if kind == "sft":
        return SFT
    if trainer == "diffusion_nft":
        return NFT
    raise RecipeError(
        f"{POLICY}.trainer_type {trainer!r} is not supported; RL of diffusers pipelines: diffusion_nft only"
    )


def is_vision_model(settings: Mapping[str, Any]) -> bool:
    name = str(settings.get("policy.model_name_or_path", "")).lower()
    return ANNOTATIONS in settings or any(word in name for word in ("-vl", "cosmos-reason"))


def should_apply_default(row: KeyMapping, source: CosmosConfig) -> bool:
    is_lora_key = row.cosmos_key.startswith("policy.lora.")
    return row.default is not ABSENT and (not is_lora_key or source.has_table("policy.lora"))


def apply_mapping(row: KeyMapping, value: Any, source: CosmosConfig, migration: Migration) -> bool:
    """Convert a value and add it to the migration. If this is impossible, record the reason and return False.

    Raises RecipeError if the value has the wrong type or form.
    """
    try:
        converted = row.convert(value, source)
    except NoCounterpart as reason:
        if row.cosmos_key in source.settings:
            migration.unsupported[row.cosmos_key] = str(reason)
        return False
    except (TypeError, ValueError, LookupError) as error:
        raise RecipeError(f"{row.cosmos_key}: cannot convert {value!r}: {error}") from error
    migration.values |= zip(row.targets, converted if isinstance(row.recipe_key, tuple) else [converted], strict=True)
    return True


# ---- YAML output


def render_recipe(migration: Migration, name: str) -> str:
    """Return the text of the recipe: comments about keys that need attention, then the YAML sections."""
    head = [
        f"{migration.mode}, converted from the Cosmos-RL configuration {name}",
        *comment_section("To be filled in", [f"{key}: {what}" for key, what in migration.missing.items()]),
        *comment_section("Unknown keys, omitted: check their spelling", sorted(migration.unknown)),
        *comment_section("Renamed keys", migration.renamed),
        *comment_section("Notes", migration.notes),
        *comment_section(
            "Without a counterpart", [f"{key}: {reason}" for key, reason in sorted(migration.unsupported.items())]
        ),
    ]
    whole_words = textwrap.TextWrapper(118, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
    wrapped = [part for line in head for part in whole_words.wrap(line)]
    return "".join(f"# {line}\n" for line in wrapped) + render_sections(migration)


def comment_section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def render_sections(migration: Migration) -> str:
    """Return the YAML sections in the order of the recipe schema. Each key that the user must fill in has a comment."""
    text = ""
    for section in Recipe.model_fields:
        values = {key: value for key, value in migration.values.items() if key.startswith(f"{section}.")}
        missing = [key for key in migration.missing if key.startswith(f"{section}.")]
        keys = {key.partition(".")[2]: value for key, value in values.items()}
        if keys:
            text += to_yaml({section: keys})
        elif missing:
            text += f"{section}:\n"
        text += "".join(f"  # {key.partition('.')[2]}: FILL IN, {migration.missing[key]}\n" for key in missing)
    return text


def check_recipe(migration: Migration, text: str) -> None:
    if migration.missing:
        raise RecipeError(f"the recipe is incomplete; fill in {', '.join(migration.missing)}")
    with tempfile.TemporaryDirectory(prefix="wfm_migrate_") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            recipe_file.load_recipe(path)
        except RecipeError as error:
            problems = str(error).replace(str(path), "line")
            raise RecipeError(f"the recipe is not valid; fix:\n{problems}") from error
