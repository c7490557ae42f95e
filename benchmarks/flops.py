"""Count the FLOPs of a training step without timing.

python -m benchmarks.flops RECIPE [section.key=value ...]     one recipe, by purpose
python -m benchmarks.flops RECIPE RECIPE ...                  one row for each recipe
python -m benchmarks.flops RECIPE --tflops 400                the hours of a run at this speed of each GPU
python -m benchmarks.flops --model sd35m --algo nft           a released model with an algorithm's published batch

The recipe gives the number of forward passes (benchmarks/forward_counts.py), and the denoiser's operators give the
FLOPs of one forward pass (wfm_ds/engine/flop_counter.py). Weights and a GPU are not needed. A model folder that does
not exist is looked up by its name in released.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.forward_counts import (
    ForwardCount,
    count_evaluation,
    count_flops,
    count_rl_step,
    count_sft_step,
    denoiser_sigmas,
    flops_by_purpose,
    guidance_counter,
    sum_forwards,
)
from benchmarks.released import RELEASED, Released
from benchmarks.report import format_table
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.engine.flop_counter import Flops
from wfm_ds.engine.policies import add_adapters, set_trainable
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.program import run_command
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import RunSizes, derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.model_loading import load_model

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
RL = {
    "data": {"kind": "prompts", "path": "prompts"},
    "rollout": {"prompts_per_step": 48, "group_size": 24},
    "reward": {"functions": [{"name": "color"}]},
}
# Recipes of `--algo`: the published batch of each algorithm, with a LoRA of rank 32 if published with one.
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "sft": {"algorithm": {"name": "sft"}, "data": {"kind": "paired", "path": "images"}},
    "nft": {**RL, "algorithm": {"name": "diffusion_nft"}, "lora": {"rank": 32}, "sampling": {"steps": 10}},
    "grpo": {
        **RL,
        "algorithm": {"name": "flow_grpo", "kl_beta": 0.04, "updates_per_rollout": 2, "min_step_std": 0},
        "lora": {"rank": 32},
        "sampling": {"steps": 10, "solver": "flow_sde", "guidance_scale": 4.5},
    },
    "ddrl": {
        **RL,
        "algorithm": {
            **{"name": "ddrl", "train_on": list(range(0, 20, 2)), "ratio_norm": "literal"},
            **{"kl_beta": 0.0, "data_beta": 0.01, "clip_ratio": 1e-4},
        },
        "data": {"kind": "paired", "path": "videos"},
        "rollout": {"prompts_per_step": 8, "group_size": 8},
        "sampling": {"steps": 20, "solver": "edm_2ab"},
    },
}


@dataclass(frozen=True, slots=True)
class CountedModel:
    """A model to count.

    texts: function that returns the conditioning of one text. Its argument is whether the text layers are frozen.
    """

    title: str
    model: DiffusionModel
    texts: Callable[[bool], Mapping[str, Tensor]]

    @classmethod
    def from_released(cls, known: Released, max_sequence_length: int | None = None) -> CountedModel:
        def texts(frozen: bool) -> Mapping[str, Tensor]:
            return known.conditioning_shapes(frozen=frozen, max_sequence_length=max_sequence_length)

        return cls(known.title, known.load(), texts)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> CountedModel:
        """Load the recipe's pipeline, or the released model of that folder name. Raises ModelError if neither
        exists."""
        path = Path(recipe.model.path)
        for known in RELEASED.values():
            if path.name == known.folder and not path.exists():
                found = cls.from_released(known, recipe.model.max_sequence_length)
                found.model.input_names = frozenset(recipe.data.inputs)
                found.model.source_size = recipe.data.source_size
                return found
        model = load_model(recipe, torch.device("cpu"))
        return cls(recipe.model.path, model, lambda _: model.encode_text([""]))


def latent_shape(recipe: Recipe, model: DiffusionModel) -> tuple[int, ...]:
    size = recipe.sampling
    try:
        return model.latent_shape(size.height, size.width, size.num_frames)
    except ValueError as error:
        raise RecipeError(f"sampling: {error}") from error


def step_forwards(recipe: Recipe, derived: RunSizes, model: DiffusionModel) -> list[dict[str, ForwardCount]]:
    """Return the forward passes of one rank for each step of the run. For SFT one step represents all steps."""
    if not recipe.is_rl:
        return [count_sft_step(recipe, derived)]
    algorithm = build_rl_algorithm(recipe, model.rollout_sigmas(recipe.sampling))
    cheap = recipe.sampling.candidate_sampling
    explored_at = None if cheap is None else model.rollout_sigmas(cheap)[:-1].tolist()
    return [
        count_rl_step(recipe, derived, algorithm, step, model=model, exploration_sigmas=explored_at)
        for step in range(1, recipe.run.steps + 1)
    ]


def correlation_sigmas(recipe: Recipe, model: DiffusionModel) -> list[float]:
    """Return the noise levels of the rollouts for the rollout correlation of an evaluation; empty if it is off."""
    if not recipe.validation.rollout_correlation:
        return []
    return denoiser_sigmas(build_rl_algorithm(recipe, model.rollout_sigmas(recipe.sampling)).plan(1))


def count_sample_flops(recipe: Recipe, subject: CountedModel) -> Flops:
    """Return the FLOPs of one sample. Changes the model's denoiser: adds adapters or makes all weights trainable."""
    model, shape = subject.model, latent_shape(recipe, subject.model)
    if recipe.lora is None:
        set_trainable(model.unwrapped_denoiser, model.find_unused_parameters())
    else:
        targets = recipe.lora.target_modules or list(model.default_lora_targets)
        model.prepare_for_lora(targets)
        with torch.device(next(model.unwrapped_denoiser.parameters()).device):
            add_adapters(model.unwrapped_denoiser, recipe.lora, targets, [], seed=0)
    texts = dict(subject.texts(recipe.lora is not None))
    texts |= {name: torch.empty(1, *size, device="meta") for name, size in model.input_shapes(shape).items()}
    return count_flops(model, shape, texts, checkpointing=recipe.model.gradient_checkpointing)


def cost_rows(steps: Sequence[Mapping[str, ForwardCount]], flops: Flops, num_replicas: int) -> list[dict[str, Any]]:
    """Return one row for each purpose and a total, averaged over the steps. Forward passes are counted on one rank; all
    other columns are sums over ranks."""
    sums = sum_forwards(*steps)
    found: list[dict[str, Any]] = []
    for purpose, work in flops_by_purpose(sums, flops).items():
        found.append(
            {
                "purpose": purpose,
                "forwards a rank": sums[purpose].calls / len(steps),
                "samples": sums[purpose].samples * num_replicas / len(steps),
                "forward FLOP": work.forward * num_replicas / len(steps),
                "backward FLOP": (work.backward + work.recompute) * num_replicas / len(steps),
            }
        )
    totals = {key: sum(row[key] for row in found) for key in found[0] if key != "purpose"}
    return [*found, {"purpose": "all", **totals}]


def format_row(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else format_flops(value) if key.endswith("FLOP") else f"{value:,.6g}"
        for key, value in row.items()
    }


def format_flops(flops: float) -> str:
    """Return FLOPs with an SI prefix, for example `2.44 T`."""
    power = min(max(int(math.log10(flops)) // 3, 0), len(PREFIXES) - 1) if flops else 0
    return f"{flops / 1000**power:.3g} {PREFIXES[power]}".strip()


@dataclass(frozen=True, slots=True)
class RecipeCost:
    """The counted forward passes and FLOPs of a recipe on a number of ranks."""

    recipe: Recipe
    title: str
    derived: RunSizes
    steps: Sequence[Mapping[str, ForwardCount]]  # of one rank
    flops: Flops
    model: DiffusionModel
    others: Sequence[int]  # guidance passes of each denoising step of an evaluation
    compared: Sequence[float]  # noise levels of the rollouts for the rollout correlation

    @classmethod
    def from_recipe(cls, recipe: Recipe, subject: CountedModel, world_size: int) -> RecipeCost:
        latent_shape(recipe, subject.model)  # raises RecipeError for an unsupported size
        derived = derive_run_sizes(recipe, world_size)
        grid = subject.model.evaluation_sigmas(recipe.sampling)
        steps = step_forwards(recipe, derived, subject.model)
        compared = correlation_sigmas(recipe, subject.model)
        others = list(map(guidance_counter(recipe, subject.model), grid[:-1].tolist()))
        flops = count_sample_flops(recipe, subject)
        return cls(recipe, subject.title, derived, steps, flops, subject.model, others, compared)

    def report(self) -> str:
        """Return the cost of one sample, of an evaluation, and of a step by purpose."""
        recipe, size, flops = self.recipe, self.recipe.sampling, self.flops
        validation = recipe.validation
        num_images = 0 if recipe.is_rl else validation.num_images
        replicas = self.derived.num_replicas
        evaluated = count_evaluation(
            recipe,
            replicas,
            num_prompts=validation.num_prompts,
            num_images=num_images,
            others=self.others,
            rollout_sigmas=self.compared,
            model=self.model,
        )
        work = sum(w.total for w in flops_by_purpose(evaluated, flops).values()) * replicas
        recomputed = f" and {format_flops(flops.recompute)}FLOP recomputed" if flops.recompute else ""
        lines = [
            f"{self.title}, {size.height} x {size.width} x {size.num_frames}, {recipe.algorithm.name}, "
            f"{'LoRA' if recipe.lora else 'all weights'}, {self.derived.replicas_text}",
            f"one sample: forward {format_flops(flops.forward)}FLOP, "
            f"backward {format_flops(flops.backward)}FLOP{recomputed}",
            f"one evaluation: {format_flops(work)}FLOP",
            f"one {'RL' if recipe.is_rl else 'optimizer'} step"
            + (f", mean of {len(self.steps)}" if len(self.steps) > 1 else ""),
            "",
            format_table([format_row(row) for row in cost_rows(self.steps, flops, replicas)]),
        ]
        return "\n".join(lines)

    def as_row(self, name: str, tflops: float | None = None) -> dict[str, str]:
        """Return the cost as one table row; with `tflops` also the hours of the run at that speed of each GPU."""
        *purposes, total = cost_rows(self.steps, self.flops, self.derived.num_replicas)
        forwards = ", ".join(f"{row['purpose']} {row['forwards a rank']:,.6g}" for row in purposes)
        size, step = self.recipe.sampling, total["forward FLOP"] + total["backward FLOP"]
        hours = {}
        if tflops is not None:
            seconds = self.recipe.run.steps * step / (tflops * 1e12 * self.derived.world_size)
            hours = {"hours": f"{seconds / 3600:.3g}"}
        return {
            "recipe": f"`{name}`",
            "size": " x ".join(str(n) for n in (size.height, size.width, size.num_frames)),
            "forwards a rank and step": forwards,
            "a sample forward": f"{format_flops(self.flops.forward)}FLOP",
            "and backward": f"{format_flops(self.flops.backward + self.flops.recompute)}FLOP",
            "a step": f"{format_flops(step)}FLOP",
            **hours,
        }


def make_published_recipe(algorithm: str, model: Released) -> Recipe:
    """Return the recipe for `--algo` at the size of the model."""
    height, width, frames = model.size
    settings = ALGORITHMS[algorithm]
    sampling = {"height": height, "width": width, "num_frames": frames, **settings.get("sampling", {})}
    sections = {"run": {"output_dir": "outputs", "steps": 100}, "model": {"path": model.folder}}
    return Recipe.model_validate({**sections, **settings, "sampling": sampling})


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), print_costs, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.flops", description="Count forwards and FLOPs of a step.")
    p.add_argument("words", nargs="*", metavar="RECIPE|section.key=value", help="recipes and overrides")
    p.add_argument("--model", choices=RELEASED, help="a released model instead of the recipe's")
    p.add_argument("--algo", choices=ALGORITHMS, help="an algorithm with its published batch, instead of a recipe")
    p.add_argument("--ranks", type=int, default=8, help="GPUs (default: 8)")
    p.add_argument("--tflops", type=float, help="TFLOP/s that a GPU is assumed to reach: adds the hours of the run")
    return p


def print_costs(args: argparse.Namespace) -> None:
    recipes = [word for word in args.words if "=" not in word]
    overrides = [word for word in args.words if "=" in word]
    if bool(recipes) == (args.algo is not None) or (args.algo and not args.model):
        raise UserError("give a recipe, or --model and --algo")
    known = RELEASED[args.model] if args.model else None
    if known is not None and args.algo:
        counts = [
            RecipeCost.from_recipe(
                make_published_recipe(args.algo, known), CountedModel.from_released(known), args.ranks
            )
        ]
    else:
        loaded = [recipe_file.load_recipe(Path(path), overrides) for path in recipes]
        counts = [
            RecipeCost.from_recipe(
                r, CountedModel.from_released(known) if known else CountedModel.from_recipe(r), args.ranks
            )
            for r in loaded
        ]
    rows = [count.as_row(Path(path).name, args.tflops) for path, count in zip(recipes, counts, strict=False)]
    sys.stdout.write((format_table(rows) if len(rows) > 1 or args.tflops else counts[0].report()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
