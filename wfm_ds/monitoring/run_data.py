"""Content of a run's page, read from the run's folder: thinned curves, samples and warnings, all of bounded size."""

from __future__ import annotations

import datetime
import json
import operator
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from wfm_ds.errors import RecipeError
from wfm_ds.monitoring.samples import SAMPLES_FILE, list_sample_folders
from wfm_ds.recipe.tree import flatten_keys
from wfm_ds.storage.atomic import finite_or_none
from wfm_ds.types import IMAGE_INPUTS

MAX_POINTS, MAX_CURVES = 1000, 40  # points per curve; curves on the page
MAX_STEPS, MAX_SAMPLES = 12, 16  # evaluations shown, and samples per evaluation
MAX_WARNINGS, MAX_CHARACTERS = 50, 500  # most recent warnings shown; characters per warning, prompt or name
MAX_RECIPE = 30_000  # characters
PANELS = (
    ("evaluation", r"val/(reward/.+/mean|accuracy|token_accuracy)"),
    ("held-out rewards", r"val/held_out/.+/mean"),
    ("reward while training", r"reward/.+/mean"),
    ("loss", r"((val|sft|dpo|vlm)/)?loss(/.+)?"),
    ("accuracy while training", r"dpo/accuracy|vlm/token_accuracy"),
    ("KL", r"kl/.+"),
    ("gradient norm", r"optim/grad_norm"),
    ("learning rate", r"optim/lr"),
    ("seconds", r"time/.+"),
    ("samples per second", r"perf/samples_per_second"),
    ("memory, GiB", r"perf/peak_memory_gib"),
)
"""Charts of the page as (title, regular expression of the tags in the chart)."""
LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\dT[\d:.]+Z) rank \d+ ([A-Z]+) [\w.]+: (.*)$")
ALARM_PREFIX = "ALARM:"  # prefix of log messages shown at the top of the page
LOAD_LINE = "load it with:"  # log message before the lines that load the weights


Point: TypeAlias = tuple[float, float]
Stretch: TypeAlias = tuple[int, Point, Point]
"""(number of points, lowest point, highest point) of consecutive points of a curve."""


class BoundedCurve:
    """A curve with a bounded number of points: the lowest and highest of each group of consecutive points."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_stretches = max_points // 2
        self._length = 1  # points in a full stretch
        self._stretches: list[Stretch] = []

    def add(self, step: float, value: float) -> None:
        point = (step, value)
        if self._stretches and self._stretches[-1][0] < self._length:
            self._stretches[-1] = merge_stretches(self._stretches[-1], (1, point, point))
            return
        self._stretches.append((1, point, point))
        if len(self._stretches) > self._max_stretches:
            pairs = zip(self._stretches[::2], [*self._stretches[1::2], None], strict=False)
            self._stretches = [one if other is None else merge_stretches(one, other) for one, other in pairs]
            self._length *= 2

    def flat_points(self) -> list[float]:
        """Return [step, value, step, value, ...] with five significant digits per value."""
        points: list[float] = []
        for _, lowest, highest in self._stretches:
            for step, value in sorted({lowest, highest}):
                points += [step, float(f"{value:.5g}")]
        return points


def merge_stretches(one: Stretch, other: Stretch) -> Stretch:
    value = operator.itemgetter(1)
    return one[0] + other[0], min(one[1], other[1], key=value), max(one[2], other[2], key=value)


class RunReader:
    """Reads a run's folder for its HTML page. Repeated calls read only new metrics and log lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._log = GrowingFile(folder / "metrics.jsonl"), GrowingFile(folder / "logs" / "rank_0.log")
        self._recipe: tuple[float, dict[str, Any]] | None = None
        self._reset_metrics()
        self._reset_log()

    def read_page(self) -> dict[str, Any]:
        lines, is_new = self._metrics.read_new_lines()
        if is_new:
            self._reset_metrics()
        for line in lines:
            self._add_metrics_line(line)
        lines, is_new = self._log.read_new_lines()
        if is_new:
            self._reset_log()
        for line in lines:
            self._add_log_line(line)
        result = read_json_object(self.folder / "result.json")
        step = result.get("step", self._step)
        return {
            "name": self.folder.resolve().name[:MAX_CHARACTERS],
            "status": str(result.get("status", "running")),
            "message": str(result.get("message", ""))[: 4 * MAX_CHARACTERS],
            "step": step,
            "updated": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "panels": self._build_panels(),
            "clock": self._clock.flat_points(),
            "samples": list(self._read_samples(self._step)),
            "alarm": self._alarm if self._is_alarmed else "",
            "warnings": self._warnings,
            "load": "\n".join(self._load)[:MAX_RECIPE],
            "machine": {k: str(v) for k, v in read_json_object(self.folder / "page" / "machine.json").items()},
            "recipe": self._load_recipe(),
        }

    # ---- metrics.jsonl

    def _reset_metrics(self) -> None:
        self._curves: dict[str, BoundedCurve] = {}
        self._tag_panels: dict[str, str | None] = {}
        self._clock = BoundedCurve()
        self._is_alarmed = False  # whether the last evaluation raised the alarm
        self._start_time: float | None = None  # time of the first line in seconds since the epoch
        # the run's last step; in RL it is read from `rollout/step`, since it may have several optimizer steps
        self._step = 0

    def _add_metrics_line(self, line: str) -> None:
        values = parse_object(line)
        try:
            step, timestamp = int(values["step"]), datetime.datetime.fromisoformat(values["time"]).timestamp()
        except (ValueError, KeyError, TypeError, OverflowError):
            return  # a partial line, written when the disk was full
        self._start_time = timestamp if self._start_time is None else self._start_time
        self._clock.add(step, timestamp - self._start_time)
        number = values.get("rollout/step", None if "rollout/step" in self._tag_panels else step)
        self._tag_panels |= {"rollout/step": None} if "rollout/step" in values else {}
        self._is_alarmed = bool(values.get("val/alarm", self._is_alarmed))
        self._step = int(number) if isinstance(number, int | float) else self._step
        for tag, value in values.items():
            if tag not in self._tag_panels:
                self._tag_panels[tag] = next((title for title, form in PANELS if re.fullmatch(form, tag)), None)
            if self._tag_panels[tag] is not None and isinstance(value, int | float):
                self._curves.setdefault(tag, BoundedCurve()).add(step, value)

    def _build_panels(self) -> list[dict[str, Any]]:
        num_left, panels = MAX_CURVES, []
        for title, _ in PANELS:
            tags = [tag for tag in sorted(self._curves) if self._tag_panels[tag] == title][:num_left]
            num_left -= len(tags)
            if tags:
                curves = [{"tag": tag[:MAX_CHARACTERS], "points": self._curves[tag].flat_points()} for tag in tags]
                panels.append({"title": title, "curves": curves})
        return panels

    # ---- logs/rank_0.log

    def _reset_log(self) -> None:
        self._warnings: list[dict[str, str]] = []
        self._alarm = ""  # text of the last alarm
        self._load: list[str] = []
        self._is_loading = False

    def _add_log_line(self, line: str) -> None:
        match = LOG_LINE.match(line)
        if match is None:
            self._load += [line] if self._is_loading else []
            return
        time, level, text = match.groups()
        self._is_loading = text == LOAD_LINE
        self._load = [] if self._is_loading else self._load
        if text.startswith(ALARM_PREFIX):
            self._alarm = text[:MAX_CHARACTERS]
        if level in ("WARNING", "ERROR", "CRITICAL"):
            self._warnings.append({"time": time, "level": level, "text": text[:MAX_CHARACTERS]})
            self._warnings = self._warnings[-MAX_WARNINGS:]

    # ---- samples/ and recipe.yaml

    def _read_samples(self, last_step: int) -> Iterator[dict[str, Any]]:
        folders = list_sample_folders(self.folder)
        for step in pick_evenly([step for step in folders if step <= last_step], MAX_STEPS):
            table = folders[step] / SAMPLES_FILE
            rows = table.read_text(encoding="utf-8", errors="replace").split("\n") if table.exists() else []
            items = [item for row in rows[:MAX_SAMPLES] if (item := parse_sample(row, step)) is not None]
            if items:
                yield {"step": step, "items": items}

    def _load_recipe(self) -> dict[str, Any]:
        path = self.folder / "recipe.yaml"
        if not path.exists():
            return {}
        changed_at = path.stat().st_mtime
        if self._recipe is None or self._recipe[0] != changed_at:
            self._recipe = changed_at, read_recipe(path)
        return self._recipe[1]


class GrowingFile:
    """A text file to which lines are appended."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0

    def read_new_lines(self) -> tuple[Iterator[str], bool]:
        """Return (complete lines since the last call, whether the file was rewritten). Raises OSError if unreadable."""
        size = self._path.stat().st_size if self._path.exists() else 0
        is_new = size < self._read_bytes
        self._read_bytes = 0 if is_new else self._read_bytes
        return self._iter_lines(), is_new

    def _iter_lines(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                yield line.decode("utf-8", "replace").rstrip("\n")


def pick_evenly(steps: Sequence[int], count: int) -> list[int]:
    if len(steps) <= count:
        return list(steps)
    return [steps[round(k * (len(steps) - 1) / (count - 1))] for k in range(count)]


def parse_sample(line: str, step: int) -> dict[str, Any] | None:
    """Return a line of samples.jsonl as {file, id, prompt, seed, rewards, images}.

    id: identifies the prompt; prompts with the same text may differ in their inputs. images: {name: file} of the input
    images. Returns None if the line is invalid or names a file in another folder.
    """
    row = parse_object(line)
    file, rewards, images = str(row.get("file", "")), row.get("rewards"), row.get("images")
    if not file or Path(file).name != file:
        return None
    items = rewards.items() if isinstance(rewards, dict) else ()
    scores = {name[:60]: value if isinstance(value, int | float) else None for name, value in items}
    return {
        "file": f"samples/step_{step}/{file}",
        "id": str(row.get("prompt_id", row.get("prompt", "")))[:MAX_CHARACTERS],
        "prompt": str(row.get("prompt", ""))[:MAX_CHARACTERS],
        "seed": str(row.get("seed", "")),
        "rewards": dict(list(scores.items())[:8]),
        "images": {
            name: f"samples/step_{step}/{image}"
            for name, image in (images.items() if isinstance(images, dict) else ())
            if name in IMAGE_INPUTS and isinstance(image, str) and Path(image).name == image
        },
    }


def read_recipe(path: Path) -> dict[str, Any]:
    """Return {text, changed, steps, model, algorithm} of a recipe, or {text} if it cannot be parsed."""
    from wfm_ds.recipe import file as recipe_file

    text = path.read_text(encoding="utf-8", errors="replace")[:MAX_RECIPE]
    try:
        recipe = recipe_file.load_stored_recipe(path)
    except RecipeError:
        return {"text": text}
    changed = flatten_keys(recipe.model_dump(mode="json", exclude_defaults=True))
    return {
        "text": text,
        "changed": {key: json.dumps(value)[:MAX_CHARACTERS] for key, value in changed.items()},
        "steps": recipe.run.steps,
        "model": str(recipe.model.path)[:MAX_CHARACTERS],
        "algorithm": recipe.algorithm.name,
    }


def read_json_object(path: Path) -> dict[str, Any]:
    return parse_object(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else {}


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, or {}. NaN, infinite numbers and integers above 64 bits become None."""
    try:
        content = json.loads(
            text,
            parse_constant=lambda name: None,
            parse_float=lambda number: finite_or_none(float(number)),
            parse_int=lambda number: int(number) if len(number) < 20 else None,
        )
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
