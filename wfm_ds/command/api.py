"""Runs from Python, for notebooks: `wfm_ds.Run.from_recipe("tiny/sd3_sft").train().samples()`.

It starts the command that `wfm train` is, in a process of its own, and reads the folder that it leaves: there is no
second trainer, and a notebook's kernel has no part in the run.
"""

from __future__ import annotations

import contextlib
import json
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
from wfm_ds.recipe.yaml_text import to_yaml

LAST_LINES = 20  # of the command's output that an error repeats


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture or video of a run's validation."""

    file: Path
    step: int
    prompt: str
    seed: int | None
    rewards: Mapping[str, float] = field(default_factory=dict)


class Run:
    """One run: a recipe, and the folder that training by it fills. Many may be open on one folder; one trains."""

    def __init__(self, recipe: Recipe, start: list[str] | None = None) -> None:
        """Use `from_recipe` or `open`. start: what follows `wfm train`; None: the run is only read."""
        self.recipe, self._start = recipe, start

    @classmethod
    def from_recipe(cls, recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Run:
        """Read a recipe: a YAML file, the name of a shipped one, or the values themselves by section.

        overrides: values by `section.key`, which replace the recipe's. Raises RecipeError as `wfm check` says it.
        """
        words = [f"{key}={_word(value)}" for key, value in (overrides or {}).items()]
        if isinstance(recipe, Mapping):
            with _written(recipe) as path:
                resolved = recipe_file.load(path, words)
            return cls(resolved, [])
        return cls(recipe_file.load(Path(recipe), words), [str(recipe), *words])

    @classmethod
    def open(cls, output_dir: str | Path) -> Run:
        """Open the folder of a run that goes on or has ended. Raises RecipeError if there is none."""
        from wfm_ds.run.layout import RECIPE

        return cls(recipe_file.load(Path(output_dir) / RECIPE, [f"run.output_dir={output_dir}"]))

    @property
    def output_dir(self) -> Path:
        return self.recipe.run.output_dir

    @property
    def page(self) -> Path:
        """The run's page, for a browser."""
        from wfm_ds.run.layout import PAGE

        return self.output_dir / PAGE

    def train(self, gpus: int | str = "all", *, overwrite: bool = False, show: bool = True) -> Run:
        """Train, or go on from the newest checkpoint, until the run ends; return the run itself.

        gpus: of this machine (on a CPU `all` is one process). overwrite: replace a run that is in the folder already.
        show: write the command's output to this process's. An interrupt stops the run as Ctrl-C does a command: it
        saves a checkpoint first. Raises UserError for what `wfm train` refuses, RunError for a run that failed.
        """
        if self._start is None:
            raise UserError(f"{self.output_dir} was opened to be read: make the run by Run.from_recipe to train it")
        options = ["--gpus", str(gpus), *(["--overwrite"] if overwrite else [])]
        with contextlib.ExitStack() as held:
            words = self._start or [str(held.enter_context(_written(self.recipe)))]
            _command([sys.executable, "-m", "wfm_ds", "train", *words, *options], show)
        return self

    def result(self) -> dict[str, Any]:
        """The end of the run (result.json): status, step, metrics, artifacts. UserError while it has not."""
        from wfm_ds.run.layout import RESULT

        path = self.output_dir / RESULT
        if not path.is_file():
            raise UserError(f"{self.output_dir} has no {RESULT}: the run has not ended, or not begun")
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result

    def metrics(self, *tags: str) -> list[dict[str, float]]:
        """The rows of metrics.jsonl so far, in their order. tags: only these and `step`, of rows that have one."""
        from wfm_ds.run.layout import METRICS

        rows = list(_rows(self.output_dir / METRICS))
        if not tags:
            return rows
        return [{k: v for k, v in row.items() if k in ("step", *tags)} for row in rows if any(t in row for t in tags)]

    def samples(self, step: int | None = None) -> list[Sample]:
        """Samples of validations so far, oldest first; of one step, if it is given."""
        from wfm_ds.monitoring.samples import TABLE

        folders = (self.output_dir / "samples").glob("step_*")
        steps = {int(folder.name.removeprefix("step_")): folder for folder in folders}
        return [
            Sample(steps[at] / row["file"], at, row["prompt"], row.get("seed"), row.get("rewards") or {})
            for at in sorted(steps)
            if step in (None, at)
            for row in _rows(steps[at] / TABLE)
        ]


def _command(words: list[str], show: bool) -> None:
    """Run it to its end, its output shown as it comes. Raises UserError and RunError by its exit code."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
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
    told = next((line for line in reversed(last) if line.startswith("error: ")), None)
    if process.returncode == 2 and told is not None:
        raise UserError(told.removeprefix("error: ").strip())
    raise RunError(f"the run ended with exit code {process.returncode}; its last lines:\n{''.join(last)}")


@contextlib.contextmanager
def _written(recipe: Recipe | Mapping[str, Any]) -> Iterator[Path]:
    """Yield a recipe as a file, as long as the context."""
    text = recipe_file.dump(recipe) if isinstance(recipe, Recipe) else to_yaml(dict(recipe))
    with tempfile.TemporaryDirectory(prefix="wfm-recipe-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        yield path


def _word(value: Any) -> str:
    """A value as an override has it: JSON is YAML."""
    return str(value) if isinstance(value, Path) else json.dumps(value)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, but for one that is being written."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
