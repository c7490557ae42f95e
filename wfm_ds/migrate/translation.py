"""A Cosmos-RL configuration of a diffusion model or a vision-language model as a recipe.

Each of its keys becomes a key of the recipe, or a comment says why it does not.
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
from wfm_ds.migrate.config import DDRL, NFT, SFT, VLM_SFT, WFM_SFT, CosmosConfig, NoCounterpart
from wfm_ds.migrate.dropped import reason_for
from wfm_ds.migrate.keys import ABSENT, FIXED, MISSPELT, MOVED, ROWS, WHOLE, Row
from wfm_ds.migrate.language_values import ANNOTATIONS
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.yaml_text import to_yaml

NEEDED = {
    "run.steps": "how many optimizer steps (SFT) or RL steps; the option --steps sets it",
    "run.output_dir": "the folder for what the run writes",
    "model.path": "the folder of a diffusers pipeline",
    "data.path": "the folder of the training data",
    "sampling.height": "pixels",
    "sampling.width": "pixels",
}
NEEDED_FOR_LANGUAGE = {
    "model.path": "the folder of a vision-language model",
    "data.path": "the annotations, a .json or .jsonl file, a folder or a list of them",
}
NEEDED_FOR_RL = {"reward.functions": "the rewards, such as [{name: ocr}]"}


@dataclass(slots=True)
class Migration:
    """A recipe as dotted keys, and the account of every key of the configuration."""

    mode: str
    values: dict[str, Any]
    missing: dict[str, str] = field(default_factory=dict)  # key of the recipe: what belongs there
    mended: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gone: dict[str, str] = field(default_factory=dict)  # key there: reason
    unknown: list[str] = field(default_factory=list)


def key_table() -> str:
    """The table of keys as Markdown."""
    lines = [f"| `{row.theirs}` | {' '.join(f'`{key}`' for key in row.targets)} |" for row in ROWS]
    return "\n".join(["| Cosmos-RL | recipe |", "|---|---|", *dict.fromkeys(lines)]) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises RecipeError when there is no such file or it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: this is not TOML: {error}") from error


def migrate(config: Mapping[str, Any], *, steps: int | None = None) -> Migration:
    """The recipe of a configuration, `steps` long if they are given.

    Raises RecipeError when it trains neither a diffusion model nor a vision-language model on annotations.
    """
    given, mended = mend(flatten(config))
    mode = mode_of(given)
    rows = [row for row in ROWS if mode in row.modes]
    defaults = {row.theirs: row.default for row in rows if row.default is not ABSENT}
    source = CosmosConfig(mode, given, defaults, steps=steps)
    migration = Migration(mode, dict(FIXED[mode]), mended=mended, notes=source.notes)
    if steps is not None:
        source.note(f"run.steps {steps} is that of --steps, whatever the configuration says")
    for row in rows:
        if row.theirs not in given and meant(row, source):
            apply(row, row.default, source, migration)
    # Written values win over defaults where both set the same key of the recipe.
    used = [row.theirs for row in rows if row.theirs in given and apply(row, given[row.theirs], source, migration)]
    migration.gone = {key: reason for key, reason in migration.gone.items() if key not in used}
    for key in given.keys() - {row.theirs for row in rows}:
        others = sorted({other for row in ROWS if row.theirs == key for other in row.modes})
        reason = reason_for(key, mode) or (f"{mode} does not read it, {' and '.join(others)} does" if others else None)
        if reason is None:
            migration.unknown.append(key)
        else:
            migration.gone[key] = reason
    places = {key: place for place, row in enumerate(rows) for key in row.targets}
    migration.values = dict(sorted(migration.values.items(), key=lambda item: places.get(item[0], -1)))
    migration.missing = {key: what for key, what in needed(mode).items() if key not in migration.values}
    return migration


def needed(mode: str) -> dict[str, str]:
    """Keys that every recipe of the mode must have, and what belongs there."""
    if mode == VLM_SFT:
        kept = {key: what for key, what in NEEDED.items() if not key.startswith("sampling.")}
        return kept | NEEDED_FOR_LANGUAGE
    return NEEDED | (NEEDED_FOR_RL if mode in (NFT, DDRL) else {})


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; lists, and tables whose keys are the user's own, stay whole."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        found |= flatten(value, f"{key}.") if isinstance(value, dict) and key not in WHOLE else {key: value}
    return found


def mend(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the present names of its keys, and a sentence for each name that was replaced."""
    found: dict[str, Any] = {}
    said: list[str] = []
    for name, value in given.items():
        key = name
        for old, new in MOVED.items():
            if key.startswith(f"{old}."):
                key = f"{new}{key.removeprefix(old)}"
        if key != name:
            said.append(f"{name} is called {key} in present versions")
        if key in MISSPELT:
            meant_key, consequence = MISSPELT[key]
            said.append(f"{key} is read as {meant_key}: {consequence}")
            key = meant_key
        if key in found:
            raise RecipeError(f"{name}: {key} is given twice, by different names; remove one of them")
        found[key] = value
    return found, said


def mode_of(given: Mapping[str, Any]) -> str:
    """The algorithm and the trainer that the configuration is for. Raises RecipeError where it is for none of ours."""
    tables = {key.partition(".")[0] for key in given}
    if tables & {"model", "trainer", "dataloader_train"}:
        return DDRL if given.get("model.rl.enabled", True) else WFM_SFT
    is_diffusers = given.get("policy.is_diffusers", any(key.startswith("policy.diffusers.") for key in given))
    policy = "train.train_policy"
    kind = given.get(f"{policy}.type", "grpo" if f"{policy}.kl_beta" in given else "sft")
    trainer = given.get(f"{policy}.trainer_type", "sft" if kind == "sft" else "grpo")
    if not is_diffusers and kind == "sft" and reads_images(given):
        return VLM_SFT
    if not is_diffusers:
        raise RecipeError(
            "the configuration trains no diffusion model: policy.is_diffusers is not true. Of language models, SFT on "
            f"LLaVA annotations is read ({ANNOTATIONS}, {policy}.type sft)"
        )
    if kind == "sft":
        return SFT
    if trainer == "diffusion_nft":
        return NFT
    raise RecipeError(
        f"{policy}.trainer_type is {trainer!r}: RL for diffusers pipelines is read for diffusion_nft only"
    )


def reads_images(given: Mapping[str, Any]) -> bool:
    """The language model is one of images and videos: it has LLaVA annotations, or the name says so."""
    name = str(given.get("policy.model_name_or_path", "")).lower()
    return ANNOTATIONS in given or any(word in name for word in ("-vl", "cosmos-reason"))


def meant(row: Row, source: CosmosConfig) -> bool:
    """True if the default of a key that the configuration lacks says anything about this run."""
    is_of_lora = row.theirs.startswith("policy.lora.")
    return row.default is not ABSENT and (not is_of_lora or source.has_table("policy.lora"))


def apply(row: Row, value: Any, source: CosmosConfig, migration: Migration) -> bool:
    """Put the value into the recipe as the row says: True; or, if it was written, among those without a counterpart."""
    try:
        made = row.convert(value, source)
    except NoCounterpart as reason:
        if row.theirs in source.given:
            migration.gone[row.theirs] = str(reason)
        return False
    except (TypeError, ValueError, LookupError) as error:
        raise RecipeError(f"{row.theirs}: {value!r} cannot be read: {error}") from error
    migration.values |= zip(row.targets, made if isinstance(row.ours, tuple) else [made], strict=True)
    return True


# ---- as YAML


def render(migration: Migration, name: str) -> str:
    """The recipe: comments that account for every key, then the sections, with placeholders for missing keys."""
    head = [
        f"{migration.mode} of {name}, a configuration of Cosmos-RL",
        *titled("To be filled in below", [f"{key}: {what}" for key, what in migration.missing.items()]),
        *titled("Unknown keys, which were left out: check their spelling", sorted(migration.unknown)),
        *titled("Mended", migration.mended),
        *titled("To be known", migration.notes),
        *titled("Without a counterpart", [f"{key}: {reason}" for key, reason in sorted(migration.gone.items())]),
    ]
    whole_words = textwrap.TextWrapper(118, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
    wrapped = [part for line in head for part in whole_words.wrap(line)]
    return "".join(f"# {line}\n" for line in wrapped) + body(migration)


def titled(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def body(migration: Migration) -> str:
    """The sections in the order of the schema; a comment in the place of a key to be filled in."""
    text = ""
    for section in Recipe.model_fields:
        inside = {key: value for key, value in migration.values.items() if key.startswith(f"{section}.")}
        missing = [key for key in migration.missing if key.startswith(f"{section}.")]
        keys = {key.partition(".")[2]: value for key, value in inside.items()}
        if keys:
            text += to_yaml({section: keys})
        elif missing:
            text += f"{section}:\n"
        text += "".join(f"  # {key.partition('.')[2]}: FILL IN, {migration.missing[key]}\n" for key in missing)
    return text


def check(migration: Migration, text: str) -> None:
    """Raises RecipeError unless the text is a recipe that can be run."""
    if migration.missing:
        raise RecipeError(f"the recipe is not complete, fill in {', '.join(migration.missing)}")
    with tempfile.TemporaryDirectory(prefix="wfm_migrate_") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            recipe_file.load(path)
        except RecipeError as error:
            problems = str(error).replace(str(path), "line")
            raise RecipeError(f"the recipe is not valid yet, change it:\n{problems}") from error
