"""Compare guards against reward hacking: `python -m benchmarks.learning.hacking`.

The digits model of the quickstart is improved with a reward that prefers white images (foolable.py), without a guard
and with each guard that a recipe offers. A second classifier, which is not part of any reward, classifies the
validation images. Their distance to the nearest digit of the data measures how far they have drifted. Writes
results/<date>-cpu-hacking.json, and the curves and images to docs/images.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.learning.runs import StudyRun, list_revisions, train_all, train_starts
from benchmarks.learning.variants import DIGITS, REPOSITORY, Variant
from wfm_ds.demos.digits import load_samples, std_within_prompts
from wfm_ds.errors import UserError
from wfm_ds.program import run_command
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_reward.rewards.digits import MAX_GREY, average_to_8x8, classifier_input

PICTURE = REPOSITORY / "docs" / "images" / "hacking.png"
JUDGE = "benchmarks.learning.foolable:Bold"
REWARD = f"val/reward/{JUDGE}/mean"
# `digits` at weight 0 is only logged: the second classifier that decides when to stop.
ALONE = f'reward.functions=[{{name: "{JUDGE}", max_batch: 64}}, {{name: digits, weight: 0, max_batch: 64}}]'
BOTH = f'reward.functions=[{{name: "{JUDGE}", max_batch: 64}}, {{name: digits, max_batch: 64}}]'
LONG = ("run.steps=32", "optimizer.schedule=constant", "optimizer.lr=3e-3")
DDRL = ("run.steps=24", "sampling.steps=6", "algorithm.train_on=[0, 2, 4]")
START, SEED = 0, 0


def nft_variant(title: str, *overrides: str) -> Variant:
    return Variant(title, DIGITS / "nft.yaml", (*LONG, *overrides), every=4)


def ddrl_variant(title: str, *overrides: str) -> Variant:
    return Variant(title, DIGITS / "ddrl.yaml", (*DDRL, ALONE, *overrides), data="images", every=4)


GUARDS: Mapping[str, Variant] = {
    "none": nft_variant("DiffusionNFT, no guard", ALONE),
    "kl_weak": nft_variant("kl_beta 1", ALONE, "algorithm.kl_beta=1"),
    "kl_strong": nft_variant("kl_beta 10", ALONE, "algorithm.kl_beta=10"),
    "two": nft_variant("a second reward (gdpo)", BOTH, "algorithm.combine=gdpo", "algorithm.advantage_std=group"),
    "ddrl_none": ddrl_variant("DDRL without data", "algorithm.data_beta=0"),
    "ddrl_weak": ddrl_variant("DDRL, data_beta 0.01", "algorithm.data_beta=0.01"),
    "ddrl_strong": ddrl_variant("DDRL, data_beta 0.1", "algorithm.data_beta=0.1"),
}


@dataclass(frozen=True, slots=True)
class HackingEvaluation:
    """The validation images of one step: their reward, and measures that are not part of any reward."""

    step: int
    reward: float
    unseen: float  # fraction that the second classifier reads as the requested digit
    distance: float  # to the nearest digit of the data: root mean square over the pixels, 0 to 1
    spread: float


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning.hacking", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/learning"), help="folder of the runs")
    p.add_argument("--guards", nargs="+", choices=GUARDS, default=list(GUARDS))
    p.add_argument("--jobs", type=int, default=2, help="parallel runs")
    p.add_argument("--until", type=int, help="only report the existing runs, up to this RL step")
    return p


def run_study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    runs = {name: StudyRun(f"hacking_{name}", GUARDS[name], START, SEED) for name in args.guards}
    if args.until is None:
        train_starts(out, [START])
        train_all(out, list(runs.values()), args.jobs)
    looks = {name: read_evaluations(out / run.name, args.until) for name, run in runs.items()}
    rows = [guard_row(GUARDS[name].title, of_run[0], of_run[-1]) for name, of_run in looks.items()]
    if "none" in looks:
        first, second = (read_evaluations(out / runs["none"].name, args.until, half) for half in (0, 1))
        rows.append(guard_row("no guard, stopped by the unseen judge", second[0], pick_stopped(first, second)))
    about = report.describe_machine() | {"runs": list_revisions(out, list(runs.values()))}
    path = report.write_results("hacking", about, rows)
    last = {name: out / run.name / "samples" / f"step_{looks[name][-1].step}" for name, run in runs.items()}
    plot_guards(looks, last, PICTURE)
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n{PICTURE}\n")


def read_evaluations(run: Path, until: int | None = None, half: int | None = None) -> list[HackingEvaluation]:
    """Read a run's evaluations up to RL step `until`. half 0 or 1: use every other image of each prompt. Raises
    UserError if the run was not evaluated at that step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = derive_run_sizes(recipe_file.load_stored_recipe(run / "recipe.yaml"), 1).updates_per_step
    rewards = {record["step"] // updates: record[REWARD] for record in records if REWARD in record}
    if until is not None and until not in rewards:
        raise UserError(f"{run} was not evaluated at RL step {until}, only at {', '.join(map(str, rewards))}")
    seen = {step: reward for step, reward in rewards.items() if until is None or step <= until}
    return [evaluate_samples(run / "samples" / f"step_{step}", step, reward, half) for step, reward in seen.items()]


def evaluate_samples(folder: Path, step: int, reward: float, half: int | None) -> HackingEvaluation:
    """Evaluate the images in a folder. `reward` belongs to all images; with `half` the other measures use only that
    half."""
    samples = load_samples(folder)  # by seed, ten prompts each
    chosen = [s for k, s in enumerate(samples) if half is None or k // 10 % 2 == half]
    shades = np.stack([classifier_input(average_to_8x8(image)) for image, _ in chosen])
    labels = [int(prompt.split()[-1]) for _, prompt in chosen]
    classifier, digits = second_classifier()
    squares = ((shades[:, None] - digits[None]) / 2) ** 2
    return HackingEvaluation(
        step=step,
        reward=reward,
        unseen=float(np.mean(classifier.predict(shades) == labels)),
        distance=float(np.sqrt(squares.mean(2).min(1)).mean()),
        spread=std_within_prompts(chosen),
    )


@cache
def second_classifier() -> tuple[Any, npt.NDArray[np.float64]]:
    """Return a classifier and its training digits: the half of the digits that the model was trained on and that no
    reward here uses."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    data = load_digits()
    shades = np.stack([classifier_input(np.rint(image * 255 / MAX_GREY)) for image in data.images[::2]])
    return SVC(gamma=0.1, C=10).fit(shades, data.target[::2]), shades


def pick_stopped(chosen_on: Sequence[HackingEvaluation], seen_on: Sequence[HackingEvaluation]) -> HackingEvaluation:
    """Choose the best step by the second classifier on one half of the images. Return it on the other half."""
    best = max(range(len(chosen_on)), key=lambda k: chosen_on[k].unseen)
    return seen_on[best]


def guard_row(title: str, start: HackingEvaluation, end: HackingEvaluation) -> dict[str, Any]:
    return {
        "guard": title,
        "RL step": end.step,
        "reward": end.reward,
        "reward gained": end.reward - start.reward,
        "unseen judge": end.unseen,
        "unseen judge gained": end.unseen - start.unseen,
        "distance to the nearest digit": end.distance,
        "spread": end.spread,
    }


def plot_guards(looks: Mapping[str, Sequence[HackingEvaluation]], last: Mapping[str, Path], path: Path) -> None:
    """Plot the second classifier and the distance over the reward, and one final image of each digit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[3, 3, 3])
    for name, of_run in looks.items():
        rewards = [seen.reward for seen in of_run]
        left.plot(rewards, [seen.unseen for seen in of_run], marker=".", label=GUARDS[name].title)
        middle.plot(rewards, [seen.distance for seen in of_run], marker=".")
    left.set(xlabel="reward that can be hacked", ylabel="fraction read by the second classifier")
    middle.set(xlabel="reward that can be hacked", ylabel="distance to the nearest digit")
    for axes in (left, middle):
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    strips = [np.concatenate([image for image, _ in load_samples(samples)[:10]], axis=1) for samples in last.values()]
    right.imshow(np.concatenate(strips), interpolation="nearest")
    right.set_xticks([])
    right.set_yticks([8 * k + 3.5 for k in range(len(last))], [GUARDS[name].title for name in last], fontsize=7)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
