"""Measure few-step distillation on the digits demo: `python -m benchmarks.learning.fewstep`.

For each seed, DiffusionNFT improves the SFT model of the quickstart. DMD2 distills its LoRA to 4 steps and to 1 step.
A control updates the fake score only once in each step. Other orders of RL and distillation are measured with the first
seed. Each row of the result describes 600 validation images of a model: both classifiers, the diversity within prompts,
and the distance to images that no model was trained on. Writes results/<date>-cpu-fewstep.json and an image to
docs/images. An interrupted study continues at the next start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from benchmarks import report
from benchmarks.learning.runs import StudyRun, list_revisions, train_all, train_starts
from benchmarks.learning.variants import DIGITS, REPOSITORY, Variant
from wfm_ds.demos.digits import load_samples
from wfm_ds.demos.digits_data import reward_split
from wfm_ds.demos.few_steps import convert_to_grey, count_forwards, find_export, read_result
from wfm_ds.monitoring.media_files import image_grid, save_png
from wfm_ds.program import run_command

PICTURE = REPOSITORY / "docs" / "images" / "few_steps.png"
START = 0  # seed of the SFT run
NUM_IMAGES = 600  # 10 prompts with 60 seeds
VALIDATION = (
    f"validation.seeds=[{', '.join(str(1_000_001 + k) for k in range(NUM_IMAGES // 10))}]",
    f"logging.num_samples={NUM_IMAGES}",
)
SHOWN_PER_DIGIT = 3  # images of a digit in the picture
TEACHER, FOUR_STEPS = "nft", ("sampling.eval_steps=4", "sampling.eval_grid=even")


def digits_variant(title: str, recipe: str, *overrides: str) -> Variant:
    return Variant(title, DIGITS / f"{recipe}.yaml", overrides, every=0)


VARIANTS: Mapping[str, Variant] = {
    TEACHER: digits_variant("DiffusionNFT", "nft"),
    "dmd2": digits_variant("DiffusionNFT, then DMD2", "dmd2"),
    "dmd2_control": digits_variant("same, 1 fake-score update per step", "dmd2", "algorithm.fake.updates=1"),
    "dmd2_one_step": digits_variant("DiffusionNFT, then DMD2", "dmd2_one_step"),
    "guided": digits_variant("SFT, guidance scale 2", "nft", "run.steps=1", "sampling.guidance_scale=2"),
    "opd": digits_variant("SFT, then OPD of guidance scale 2", "opd"),
    "nft_four_steps": digits_variant("SFT, then DiffusionNFT in 4 steps", "nft", "sampling.steps=4", *FOUR_STEPS),
    "dmd2_reward": digits_variant("SFT, then DMD2 with DiffusionNFT's loss", "dmd2_reward"),
    "dmd2_flow_grpo": digits_variant(
        "SFT, then DMD2 with Flow-GRPO's loss, noise in each step",
        "dmd2_reward",
        "sampling.solver=cps",
        "sampling.noise_level=1",
        "sampling.eval_solver=cps",
        "algorithm.reward={loss: flow_grpo, weight: 5}",
    ),
}
FROM_TEACHER = ("dmd2", "dmd2_control", "dmd2_one_step")  # runs for each seed
FROM_SFT = ("guided", "opd", "nft_four_steps", "dmd2_reward", "dmd2_flow_grpo")  # runs for the first seed


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A row of the result: the model at the end of a run, or the model that the run starts from."""

    title: str
    run: StudyRun
    num_steps: int  # denoising steps
    is_end: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning.fewstep", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/fewstep"), help="folder of the runs")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of RL and distillation")
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    p.add_argument("--jobs", type=int, default=2, help="parallel runs")
    p.add_argument("--name", default="fewstep", help="name of the results' file")
    return p


def run_study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    train_starts(out, [START])
    train_all(out, [make_run(out, TEACHER, seed) for seed in args.seeds if TEACHER in args.variants], args.jobs)
    runs = [make_run(out, name, seed) for seed in args.seeds for name in args.variants if name in FROM_TEACHER]
    runs += [make_run(out, name, args.seeds[0]) for name in args.variants if name in FROM_SFT]
    train_all(out, runs, args.jobs)
    if set(args.variants) != set(VARIANTS):  # a part of the study, which continues later
        return
    teachers = {seed: make_run(out, TEACHER, seed) for seed in args.seeds}
    rows = [row for seed in args.seeds for row in measure_models(out, distilled_models(out, teachers[seed]))]
    rows += measure_models(out, [model for name in FROM_SFT for model in other_models(out, name, args.seeds[0])])
    about = report.describe_machine() | {"runs": list_revisions(out, [*teachers.values(), *runs])}
    path = report.write_results(args.name, about, rows)
    write_picture(out, distilled_models(out, teachers[args.seeds[0]]))
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n{PICTURE}\n")


def make_run(out: Path, variant: str, seed: int) -> StudyRun:
    teacher = out / f"{TEACHER}_{seed}"
    start = [f"lora.init_from={find_export(teacher) / 'lora'}"] if variant in FROM_TEACHER else []
    return StudyRun(f"{variant}_{seed}", VARIANTS[variant], START, seed, (*VALIDATION, *start))


def distilled_models(out: Path, teacher: StudyRun) -> list[MeasuredModel]:
    """Return the models for one seed. The first one is the teacher."""
    four, control, one = (make_run(out, name, teacher.seed) for name in FROM_TEACHER)
    return [
        MeasuredModel(teacher.variant.title, teacher, 12),
        MeasuredModel(teacher.variant.title, four, 4, is_end=False),
        MeasuredModel(four.variant.title, four, 4),
        MeasuredModel(control.variant.title, control, 4),
        MeasuredModel(teacher.variant.title, one, 1, is_end=False),
        MeasuredModel(one.variant.title, one, 1),
    ]


def other_models(out: Path, variant: str, seed: int) -> list[MeasuredModel]:
    run = make_run(out, variant, seed)
    if variant == "guided":  # its run measures the model before it trains
        return [MeasuredModel(run.variant.title, run, 12, is_end=False)]
    titles = {"opd": "SFT", "dmd2_flow_grpo": "SFT, noise in each step"}
    start = [MeasuredModel(titles[variant], run, 4, is_end=False)] if variant in titles else []
    return [*start, MeasuredModel(run.variant.title, run, 4)]


def measure_models(out: Path, models: Sequence[MeasuredModel]) -> list[dict[str, Any]]:
    return [measure_model(out, model) for model in models]


def measure_model(out: Path, model: MeasuredModel) -> dict[str, Any]:
    folder = out / model.run.name
    result = read_result(folder, is_last=model.is_end)
    images = np.stack([convert_to_grey(image)[..., 0] for image, _ in load_samples(result.samples)])
    return {
        "model": model.title,
        "seed": model.run.seed,
        "steps": model.num_steps,
        "reward": result.reward,
        "second classifier": result.second,
        "diversity": result.diversity,
        "color noise": result.color_noise,
        "Frechet distance": frechet_distance(images, reward_split()[0]),
        "thousand forwards of the run": count_forwards(folder) / 1000 if model.is_end else None,
    }


def frechet_distance(images: npt.NDArray[np.uint8], others: npt.NDArray[np.uint8]) -> float:
    """Return the Frechet distance between the pixels of two sets of images [N,8,8], scaled to [0, 1]."""
    means, covariances = [], []
    for some in (images, others):
        pixels = some.reshape(len(some), -1) / 255.0
        means.append(pixels.mean(0))
        covariances.append(np.cov(pixels.T) + 1e-6 * np.eye(pixels.shape[1]))
    product = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    return float(((means[0] - means[1]) ** 2).sum() + np.trace(covariances[0] + covariances[1] - 2 * product))


def write_picture(out: Path, models: Sequence[MeasuredModel]) -> None:
    """Write one row of images for each model, with SHOWN_PER_DIGIT neighbouring images of each digit."""
    images, titles = [], []
    for model in models:
        samples = load_samples(read_result(out / model.run.name, is_last=model.is_end).samples)
        images += [samples[10 * k + digit][0] for digit in range(10) for k in range(SHOWN_PER_DIGIT)]
        titles.append(f"{model.title}, {model.num_steps} step{'s' * (model.num_steps > 1)}")
    save_png(PICTURE, image_grid(images, 10 * SHOWN_PER_DIGIT, scale=4, row_titles=titles))


if __name__ == "__main__":
    sys.exit(main())
