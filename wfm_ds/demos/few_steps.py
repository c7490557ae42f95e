"""The few-step demo: DMD2 distills the LoRA of the digits quickstart to 4 steps and to 1 step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.demos.base import load_evaluations
from wfm_ds.demos.digits import GRID_COLUMNS, GRID_ROWS, load_samples, std_within_prompts, write_readings
from wfm_ds.demos.report_page import figures_html, write_sections
from wfm_ds.storage import atomic
from wfm_ds.storage.json_lines import read_json_rows

DESCRIPTION = "few-step distillation"
OUTPUT, START = Path("outputs/quickstart-fewstep"), Path("outputs/quickstart")
TEACHER_RUN = "nft"  # folder of the RL run in the folder of the digits quickstart
RUNS: Mapping[str, tuple[str, Sequence[str]]] = {
    "dmd2": ("digits/dmd2", ()),
    "dmd2_control": ("digits/dmd2", ("algorithm.fake.updates=1",)),
    "dmd2_one_step": ("digits/dmd2_one_step", ()),
}
"""{folder of a run: (shipped recipe, overrides)}."""
TAGS = ("val/reward/digits", "val/held_out/digits")  # metric of a run that trains on this reward, and of other runs
FORWARD_SAMPLES, VALIDATION = "perf/forward_samples_", "perf/forward_samples_validation"
BACKWARD_COST = 2  # of a backward pass in forward passes: gradients of inputs and of weights


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A model in the report. Its samples are from the first evaluation of a run (before distillation) or the last."""

    name: str  # of the image file
    title: str
    run: str  # "": the RL run of the digits quickstart
    is_distilled: bool  # if False and `run` is set: the model before the first step of the run


MODELS = (
    ComparedModel("teacher", "teacher, 12 steps", "", False),
    ComparedModel("four_before", "teacher's LoRA, 4 steps", "dmd2", False),
    ComparedModel("four", "DMD2, 4 steps", "dmd2", True),
    ComparedModel("four_control", "control: fake score updated once per step, 4 steps", "dmd2_control", True),
    ComparedModel("one_before", "teacher's LoRA, 1 step", "dmd2_one_step", False),
    ComparedModel("one", "DMD2, 1 step", "dmd2_one_step", True),
)


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Measurements on a model's validation samples."""

    samples: Path  # folder
    reward: float  # fraction of samples that the reward's classifier reads as the digit in the prompt
    second: float  # the same for the second classifier
    diversity: float  # standard deviation between the grey images of a prompt, averaged over pixels and prompts
    color_noise: float  # standard deviation between the color channels; the digits of the data are grey
    num_samples: int


def read_result(run: Path, *, is_last: bool = True) -> ModelResult:
    records = list(read_json_rows(run / "metrics.jsonl"))
    tag = next(tag for tag in TAGS if any(f"{tag}/mean" in record for record in records))
    samples_folder, metrics = load_evaluations(run, f"{tag}/mean")[-1 if is_last else 0]
    samples = load_samples(samples_folder)
    return ModelResult(
        samples=samples_folder,
        reward=metrics[f"{tag}/mean"],
        second=metrics[f"{tag}/second_judge/mean"],
        diversity=std_within_prompts([(convert_to_grey(image), prompt) for image, prompt in samples]),
        color_noise=float(np.mean([(image / 255.0).std(axis=2).mean() for image, _ in samples])),
        num_samples=len(samples),
    )


def convert_to_grey(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    grey: npt.NDArray[np.uint8] = image.mean(axis=2, keepdims=True).round().astype(np.uint8)
    return grey


def step_cost(record: Mapping[str, Any]) -> float:
    """Return the cost of a step on rank 0, without evaluations, in forward passes of one sample.

    record: the step's line in metrics.jsonl. A backward pass costs as much as BACKWARD_COST forward passes.
    """
    counted = {key: value for key, value in record.items() if key.startswith(FORWARD_SAMPLES) and key != VALIDATION}
    trained = sum(value for key, value in counted.items() if key.endswith("policy"))
    return float(sum(counted.values()) + BACKWARD_COST * trained)


def count_forwards(run: Path) -> float:
    """Return the cost of a run over all ranks, without evaluations, in forward passes of one sample."""
    num_ranks = len(list((run / "logs").glob("rank_*.log")))
    return num_ranks * sum(map(step_cost, read_json_rows(run / "metrics.jsonl")))


def find_export(run: Path) -> Path:
    return run / "safetensors" / f"step_{json.loads((run / 'result.json').read_text())['step']}"


def start_overrides(start: Path) -> list[str]:
    return [
        f"model.path={find_export(start / 'sft')}",
        f"lora.init_from={find_export(start / TEACHER_RUN) / 'lora'}",
        f"data.path={start / 'data' / 'prompts'}",
    ]


def write_comparison(folder: Path, start: Path) -> list[str]:
    """Write an image NAME.png of the samples of each model, and return the lines of the table.

    folder: contains the run folders of RUNS. start: folder of the digits quickstart.
    """
    rows = []
    for model in MODELS:
        run = folder / model.run if model.run else start / TEACHER_RUN
        result = read_result(run, is_last=model.is_distilled or not model.run)
        write_readings(folder / f"{model.name}.png", load_samples(result.samples)[: GRID_ROWS * GRID_COLUMNS])
        cost = f"{count_forwards(run) / 1000:.0f}" if model.is_distilled else ""
        measured = (result.reward, result.second, result.diversity, result.color_noise)
        rows.append(f"| {model.title} | {' | '.join(f'{value:.3f}' for value in measured)} | {cost} |")
    return [
        f"| on held-out noise seeds, {result.num_samples} images | classifier of the reward | second classifier "
        "| diversity | color noise | distillation, thousand forward passes |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def diffusers_lines(folder: Path, start: Path) -> list[str]:
    from wfm_ds.export.loading_code import loading_lines

    lora = find_export(folder / "dmd2") / "lora"
    loading = loading_lines(find_export(start / "sft"), lora, lora=True).splitlines()
    return [
        "import json",
        *(line for line in loading if not line.startswith("#")),
        f'call = json.load(open("{lora / "call.json"}"))  # the number of steps and their noise levels',
        'pipe(**call | {"prompt": "the digit 3"}).images[0].save("digit.png")',
    ]


def write_report(folder: Path, start: Path, code: Sequence[str], *, seconds: float) -> str:
    """Write report.md and index.html, and return the text of the report.

    folder: contains the run folders of RUNS. start: folder of the digits quickstart. code: lines of Python code that
    generate an image with diffusers. seconds: duration of the demo.
    """
    report = [
        *write_comparison(folder, start),
        "",
        "Classifier: fraction of images that it reads as the digit in the prompt. Diversity: standard deviation "
        "between the images of one prompt, which are converted to grey. Color noise: standard deviation between the "
        "color channels; the digits of the data are grey. Forward passes: one for each sample, and two more for a "
        "backward pass.",
        f"Total time: {seconds:.0f} s.",
        "",
        "Generate in 4 steps with diffusers alone:",
        "",
        *(f"    {line}" for line in code),
    ]
    text = "\n".join(report)
    atomic.write_text(folder / "report.md", text + "\n")
    images = {model.title: f'<img src="{model.name}.png" alt="{escape(model.title)}">' for model in MODELS}
    sections = [
        "<h2>Samples</h2>",
        "<p>One column for each digit. Below each image: what the classifier of the reward reads, green if it is the "
        "digit in the prompt.</p>",
        figures_html(images),
    ]
    write_sections(DESCRIPTION, folder, sections, report, RUNS)
    return text
