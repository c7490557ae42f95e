"""Uploads exports and their model cards to a repository on the Hub, in a thread of rank 0.

A failed upload never ends the run. huggingface_hub manages the token (HF_TOKEN or `hf auth login`).
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData, constants, errors, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from pydantic import BaseModel

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.export.weights import ADAPTER_CONFIG
from wfm_ds.models.assets.hub import hide_bars_without_terminal, snapshot_origin
from wfm_ds.monitoring.samples import SAMPLES_FILE, escape_cell, list_sample_folders
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import to_yaml
from wfm_ds.runs.layout import METRICS_FILE
from wfm_ds.storage.filesystem import is_repo_id, shorten_error
from wfm_ds.storage.json_lines import read_json_rows

log = logging.getLogger(__name__)

# Maximum wait for pending uploads at the end of a run: MIN_WAIT_S, and longer for large exports.
MIN_WAIT_S, SLOWEST_BYTES_PER_S = 300.0, 4 << 20
STOPPED_WAIT_S = 20.0  # maximum wait after a stop signal
POLL_INTERVAL_S = 1.0
# errors.HTTPError: no connection (from the HTTP client of huggingface_hub).
PUSH_ERRORS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]

SHOWN_METRICS = ("val/", "reward/", "loss/", "sft/loss")  # metrics listed in the card
MAX_METRICS, MAX_SAMPLES = 20, 4
PUBLIC_SECTIONS = (
    *("run", "model", "lora", "ema", "optimizer", "engine", "data", "sampling", "algorithm", "rollout", "reward"),
    "validation",
)
PUBLIC_TEXTS = (
    *("algorithm.name", "reward.functions.name", "validation.held_out_rewards.name"),
    *("lora.target_modules", "lora.modules_to_save", "data.inputs"),
)
"""Recipe keys whose text the model card shows if it matches NAME.

The card shows the values of other keys only if they are numbers, true, false or a choice.
"""
NAME = re.compile(r"[A-Za-z_][\w.-]*(:\w+)?(/[\w.-]+)?")  # of a reward, layer, input, or class (package.module:Class)


class HubPush:
    """Uploads complete exports to the repository in `export.push_to_hub`, one at a time. Only rank 0 uses it."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.export.push_to_hub is not None
        self.recipe, self.repo = recipe, recipe.export.push_to_hub
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub push")
        self._sending: list[tuple[Future[None], Path]] = []
        if constants.HF_HUB_OFFLINE:
            log.warning("export.push_to_hub %s: HF_HUB_OFFLINE is set, exports will not be uploaded", self.repo)
        elif get_token() is None:
            log.warning(
                "export.push_to_hub %s: no token (HF_TOKEN or hf auth login): uploads will be rejected", self.repo
            )

    def send(self, folder: Path, base: Path, step: int, lines: str) -> None:
        """Queue the upload of an export folder. The folder must not change until `finish` returns.

        base: folder of the base model. lines: Python code that loads the export, written to the model card.
        """
        self._sending.append((self._thread.submit(self._send, folder, base, step, lines), folder))

    def finish(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for all uploads. Logs a warning for each incomplete upload, with a command that repeats the upload.

        is_stopped: returns whether this process has received a stop signal. The wait is then shorter.
        """
        pending = [folder for future, folder in self._sending if not future.done()]
        num_bytes = sum(file.stat().st_size for folder in pending for file in folder.rglob("*") if file.is_file())
        start_s, wait_s = time.monotonic(), MIN_WAIT_S + num_bytes / SLOWEST_BYTES_PER_S
        deadline_s, stop_deadline_s = start_s + wait_s, math.inf
        if pending:
            log.info("uploading to %s, for at most %.0f s; Ctrl-C or SIGTERM ends the wait", self.repo, wait_s)
        for future, folder in self._sending:
            while not future.done() and time.monotonic() < min(deadline_s, stop_deadline_s):
                LIVENESS.record_progress()
                wait([future], timeout=POLL_INTERVAL_S)
                if is_stopped():
                    stop_deadline_s = min(stop_deadline_s, time.monotonic() + STOPPED_WAIT_S)
            if not future.done():
                future.cancel()
                self._warn_unsent(folder, f"not finished in {time.monotonic() - start_s:.0f} s")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, folder: Path, base: Path, step: int, lines: str) -> None:
        try:
            api, repo = HfApi(), self.repo
            samples = list_last_samples(self.recipe.run.output_dir)
            base_id = base_model_id(self.recipe.model.path, base)
            lines = hub_loading_lines(lines, folder, base, repo)
            card = build_model_card(self.recipe, repo, step, lines, base_id, samples)
            files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
            contents: dict[str, str | bytes] = {name: str(path) for name, path in (files | samples).items()}
            contents["README.md"] = card.encode()
            if ADAPTER_CONFIG in files:  # in the run's folder, it names the local folder of the base model
                settings = json.loads(files[ADAPTER_CONFIG].read_text()) | {"base_model_name_or_path": base_id}
                contents[ADAPTER_CONFIG] = json.dumps(settings, indent=2).encode()
            operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
            with hide_bars_without_terminal():
                api.create_repo(repo, private=self.recipe.export.private, exist_ok=True)
                api.create_commit(repo, operations, commit_message=f"step {step}")
        except PUSH_ERRORS as error:
            self._warn_unsent(folder, shorten_error(error))
            return
        log.info("uploaded the export of step %d to %s/%s", step, constants.ENDPOINT, repo)

    def _warn_unsent(self, folder: Path, reason: str) -> None:
        options = " --private" if self.recipe.export.private else ""
        options += f" --exclude {ADAPTER_CONFIG}" if (folder / ADAPTER_CONFIG).exists() else ""  # names a local folder
        log.warning(
            "export.push_to_hub: %s was not uploaded (%s). To upload it, run: hf upload %s %s .%s",
            *(folder, reason, self.repo, shlex.quote(str(folder)), options),
        )


def base_model_id(path: str, folder: Path) -> str | None:
    """Return the Hub id of the base model, or None if the base model is a local folder."""
    hub_origin = snapshot_origin(folder)
    return hub_origin[0] if hub_origin is not None else path if is_repo_id(path) else None


def hub_loading_lines(lines: str, folder: Path, base: Path, repo: str) -> str:
    """Return the loading code with Hub names instead of local paths.

    The path of the export becomes `repo`. The path of the base model becomes the name of its folder.
    """
    from_repo = lines.replace(f'load_file("{folder}/', f'load_file(hf_hub_download("{repo}", "').replace(
        '.safetensors"), strict', '.safetensors")), strict'
    )
    if from_repo != lines:
        from_repo = "from huggingface_hub import hf_hub_download\n" + from_repo
    return from_repo.replace(str(folder), repo).replace(str(base), base.name)


def build_model_card(
    recipe: Recipe, repo: str, step: int, lines: str, base: str | None, samples: Mapping[str, Path]
) -> str:
    """Return the text of README.md for an export.

    lines: Python code that loads the export. base: Hub id of the base model, or None. samples: {name in the repository:
    file} for samples of the last validation.
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
        "## Recipe\n\nWithout default values, paths, addresses, free text and options of rewards.\n\n"
        f"```yaml\n{to_yaml({name: one for name, one in public_values(recipe).items() if name in PUBLIC_SECTIONS})}```",
    ]
    return "\n\n".join(parts) + "\n"


def public_values(section: BaseModel, path: str = "") -> dict[str, Any]:
    """Return the values of a recipe section that differ from the default and cannot contain a secret or an address.

    path: location of the section in the recipe, with a trailing dot.
    """
    values: dict[str, Any] = {}
    for key in section.model_dump(mode="json", exclude_defaults=True):
        value, annotation = getattr(section, key), type(section).model_fields[key].annotation
        items = list(value) if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, BaseModel) for item in items):
            public = [public_values(item, f"{path}{key}.") for item in items]
        else:
            public = [item for item in items if _is_public(item, f"{path}{key}", annotation)]
        if any(item != {} for item in public):
            values[key] = public if isinstance(value, list | tuple) else public[0]
    return values


def _is_public(value: Any, path: str, annotation: Any) -> bool:
    if isinstance(value, str):
        return value in _literal_values(annotation) or (path in PUBLIC_TEXTS and NAME.fullmatch(value) is not None)
    return value is None or isinstance(value, bool | int | float)


def _literal_values(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in _literal_values(part)}


def list_last_samples(output_dir: Path) -> dict[str, Path]:
    """Return {name in the repository: file} for the first samples of the last validation."""
    folders = list(list_sample_folders(output_dir).values())
    files = sorted(folders[-1].iterdir()) if folders else []
    files = [path for path in files if path.suffix in (".png", ".mp4")][:MAX_SAMPLES]
    return {f"samples/{path.name}": path for path in files}


def _metrics_section(output_dir: Path) -> Iterator[str]:
    last: dict[str, float] = {}
    for row in read_json_rows(output_dir / METRICS_FILE):
        shown = {tag: value for tag, value in row.items() if tag.startswith(SHOWN_METRICS)}
        last |= {tag: value for tag, value in shown.items() if isinstance(value, int | float)}
    rows = [f"| `{tag}` | {value:.5g} |" for tag, value in sorted(last.items())[:MAX_METRICS]]
    if rows:
        yield "\n".join(["## Metrics\n", "| metric | last value |", "|---|---|", *rows])


def _samples_section(samples: Mapping[str, Path]) -> Iterator[str]:
    if not samples:
        return
    table = next(iter(samples.values())).parent / SAMPLES_FILE
    prompts = {row.get("file"): row for row in read_json_rows(table)}
    rows: Sequence[str] = [
        f"| ![]({name}) | {escape_cell(str(prompts.get(path.name, {}).get('prompt', '')))} | "
        f"{prompts.get(path.name, {}).get('seed', '')} |"
        for name, path in samples.items()
    ]
    yield "\n".join(["## Samples\n", "| | prompt | seed |", "|---|---|---|", *rows])
