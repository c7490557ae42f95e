"""Python API to train runs and read their results: `wfm_ds.Run.from_recipe("sd3_nft", tiny=True).train().samples()`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wfm_ds.errors import RunError, UserError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import to_yaml
from wfm_ds.storage.json_lines import read_json_rows

ERROR_LINES = 20  # last output lines to include in an error


@dataclass(frozen=True, slots=True)
class ValidationSample:
    """An image or video that a run generated during validation."""

    file: Path
    step: int
    prompt: str
    seed: int | None
    rewards: Mapping[str, float] = field(default_factory=dict)


class Run:
    """A training run: a recipe and its output folder.

    Any number of objects may read the same folder, but only one may train in it.
    """

    def __init__(self, recipe: Recipe, train_arguments: list[str] | None = None) -> None:
        """Do not call the constructor; use `from_recipe` or `open`.

        train_arguments: arguments of `wfm train`, or None to read an existing run.
        """
        self.recipe, self._train_arguments = recipe, train_arguments

    @classmethod
    def from_recipe(
        cls, recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, tiny: bool = False
    ) -> Run:
        """Create a run from a recipe: a YAML file, the name of a shipped recipe, or a mapping of sections.

        overrides: {"section.key": value}, values that replace values of the recipe.
        tiny: train a tiny model with built-in data on a CPU, like `wfm train --tiny`.

        Raises RecipeError for an invalid recipe.
        """
        arguments = [f"{key}={_override_value(value)}" for key, value in (overrides or {}).items()]
        if isinstance(recipe, Mapping):
            if tiny:
                raise UserError("tiny=True needs a recipe file or name, not a mapping")
            with _temporary_recipe(recipe) as path:
                resolved = recipe_file.load_recipe(path, arguments)
            return cls(resolved, [])
        load = recipe_file.load_tiny_recipe if tiny else recipe_file.load_recipe
        return cls(load(Path(recipe), arguments), [str(recipe), *arguments, *(["--tiny"] if tiny else [])])

    @classmethod
    def open(cls, output_dir: str | Path) -> Run:
        """Open the output folder of a running or finished run. Raises RecipeError if the folder has no recipe."""
        from wfm_ds.runs.layout import RECIPE_FILE

        return cls(recipe_file.load_stored_recipe(Path(output_dir) / RECIPE_FILE, [f"run.output_dir={output_dir}"]))

    @property
    def output_dir(self) -> Path:
        return self.recipe.run.output_dir

    @property
    def page(self) -> Path:
        from wfm_ds.runs.layout import PAGE

        return self.output_dir / PAGE

    def train(self, gpus: int | str = "all", *, overwrite: bool = False, show: bool = True) -> Run:
        """Train to the end and return `self`. Resumes from the newest checkpoint if there is one.

        gpus: number of GPUs of this machine, or "all" (one CPU process on a machine without GPUs).
        overwrite: replace an existing run in the output folder.
        show: print the output of `wfm train`.

        A KeyboardInterrupt stops the run after it saves a checkpoint. Raises UserError if `wfm train` reports a user
        error, and RunError if it fails otherwise.
        """
        if self._train_arguments is None:
            raise UserError(f"{self.output_dir} is read-only: to train, create the run with Run.from_recipe")
        options = ["--gpus", str(gpus), *(["--overwrite"] if overwrite else [])]
        with contextlib.ExitStack() as stack:
            arguments = self._train_arguments or [str(stack.enter_context(_temporary_recipe(self.recipe)))]
            _run_command([sys.executable, "-m", "wfm_ds", "train", *arguments, *options], show)
        return self

    def result(self) -> dict[str, Any]:
        """Return result.json: status, step, metrics, artifacts. Raises UserError if the run has not ended."""
        from wfm_ds.runs.layout import RESULT_FILE

        path = self.output_dir / RESULT_FILE
        if not path.is_file():
            raise UserError(f"{self.output_dir} has no {RESULT_FILE}: the run has not finished, or not started")
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result

    def metrics(self, *tags: str) -> list[dict[str, float]]:
        """Return the rows of metrics.jsonl in order, as {tag: value}.

        tags: if given, return only these tags and `step`, and omit rows without these tags.
        """
        from wfm_ds.runs.layout import METRICS_FILE

        rows = list(read_json_rows(self.output_dir / METRICS_FILE))
        if not tags:
            return rows
        return [{k: v for k, v in row.items() if k in ("step", *tags)} for row in rows if any(t in row for t in tags)]

    def samples(self, step: int | None = None) -> list[ValidationSample]:
        """Return the validation samples of `step`, or of all steps if it is None, oldest first."""
        from wfm_ds.monitoring.samples import SAMPLES_FILE, list_sample_folders

        return [
            ValidationSample(folder / row["file"], number, row["prompt"], row.get("seed"), row.get("rewards") or {})
            for number, folder in list_sample_folders(self.output_dir).items()
            if step in (None, number)
            for row in read_json_rows(folder / SAMPLES_FILE)
        ]


def _run_command(arguments: list[str], show: bool) -> None:
    """Run a command line. show: print its output.

    Raises UserError if the command prints `error: ...` and exits with code 2, and RunError for any other failure.
    """
    last: deque[str] = deque(maxlen=ERROR_LINES)
    plain = {**os.environ, "NO_COLOR": "1"}  # the output is searched for the line with the error
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=plain) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line)
                if show:
                    sys.stdout.write(line)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if process.returncode == 0:
        return
    error_line = next((line for line in reversed(last) if line.startswith("error: ")), None)
    if process.returncode == 2 and error_line is not None:
        raise UserError(error_line.removeprefix("error: ").strip())
    raise RunError(f"the run ended with exit code {process.returncode}; last lines:\n{''.join(last)}")


@contextlib.contextmanager
def _temporary_recipe(recipe: Recipe | Mapping[str, Any]) -> Iterator[Path]:
    text = recipe_file.dump_recipe(recipe) if isinstance(recipe, Recipe) else to_yaml(dict(recipe))
    with tempfile.TemporaryDirectory(prefix="wfm-recipe-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        yield path


def _override_value(value: Any) -> str:
    return str(value) if isinstance(value, Path) else json.dumps(value)
