"""Model card of an export on the Hub. It describes the training and contains loading code, but no local paths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from wfm_ds.monitoring.samples import SAMPLES_FILE
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.yaml_text import to_yaml
from wfm_ds.runs.layout import METRICS_FILE

SHOWN_METRICS = ("val/", "reward/", "loss/", "sft/loss")  # metrics listed in the card
MAX_METRICS, MAX_SAMPLES = 20, 4
PRIVATE_KEYS = ("endpoint", "storage")  # keys with addresses of a cluster
PATH_PREFIXES = ("/", "~", "./", "../", "s3://", "http://", "https://", "tcp://", "unix:")


def build_model_card(
    recipe: Recipe, repo: str, step: int, lines: str, base: str | None, samples: Mapping[str, Path]
) -> str:
    """Return the text of README.md for an export.

    lines: Python code that loads the export.
    base: Hub id of the base model, or None.
    samples: {name in the repository: file} for samples of the last validation.
    """
    kind = "LoRA" if recipe.lora is not None else "Weights"
    data = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "adapter" if recipe.lora is not None else "finetune",
        library_name="transformers" if recipe.algorithm.trains_language else "diffusers",
        tags=["wfm_ds", recipe.algorithm.name, *(["lora"] if recipe.lora is not None else [])],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.partition('/')[2]}",
        f"{kind} after step {step} of {recipe.algorithm.name}, trained with wfm_ds{f' on {base}' if base else ''}.",
        f"## Load it\n\n```python\n{lines}\n```",
        *_metrics_section(recipe.run.output_dir),
        *_samples_section(samples),
        "## Recipe\n\nWithout default values; paths are shortened to their last part.\n\n"
        f"```yaml\n{to_yaml(remove_private_values(recipe.model_dump(mode='json', exclude_defaults=True)))}```",
    ]
    return "\n\n".join(parts) + "\n"


def remove_private_values(value: Any) -> Any:
    """Remove addresses from recipe values and shorten paths to their last component. Works on nested values."""
    if isinstance(value, Mapping):
        return {key: remove_private_values(one) for key, one in value.items() if key not in PRIVATE_KEYS}
    if isinstance(value, list):
        return [remove_private_values(one) for one in value]
    if isinstance(value, str) and (value.startswith(PATH_PREFIXES) or ("/" in value and Path(value).exists())):
        return Path(value).name
    return value


def list_last_samples(output_dir: Path) -> dict[str, Path]:
    """Return {name in the repository: file} for the first samples of the last validation."""
    steps = sorted((output_dir / "samples").glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
    if not steps:
        return {}
    files = [path for path in sorted(steps[-1].iterdir()) if path.suffix in (".png", ".mp4")][:MAX_SAMPLES]
    return {f"samples/{path.name}": path for path in files}


def _metrics_section(output_dir: Path) -> Iterator[str]:
    last: dict[str, float] = {}
    for row in _read_json_lines(output_dir / METRICS_FILE):
        last |= {
            tag: value for tag, value in row.items() if tag.startswith(SHOWN_METRICS) and isinstance(value, int | float)
        }
    rows = [f"| `{tag}` | {value:.5g} |" for tag, value in sorted(last.items())[:MAX_METRICS]]
    if rows:
        yield "\n".join(["## Metrics\n", "| metric | last value |", "|---|---|", *rows])


def _samples_section(samples: Mapping[str, Path]) -> Iterator[str]:
    if not samples:
        return
    table = next(iter(samples.values())).parent / SAMPLES_FILE
    prompts = {row.get("file"): row for row in _read_json_lines(table)}
    rows: Sequence[str] = [
        f"| ![]({name}) | {_escape_cell(prompts.get(path.name, {}).get('prompt', ''))} | "
        f"{prompts.get(path.name, {}).get('seed', '')} |"
        for name, path in samples.items()
    ]
    yield "\n".join(["## Samples\n", "| | prompt | seed |", "|---|---|---|", *rows])


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file. Ignores an incomplete last row."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
