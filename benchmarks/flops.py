"""The FLOPs of a training step, counted and not timed.

python -m benchmarks.flops RECIPE [section.key=value ...]     one recipe, purpose by purpose
python -m benchmarks.flops RECIPE RECIPE ...                  one row a recipe
python -m benchmarks.flops RECIPE --tflops 400                the hours of a run whose GPUs reach so much
python -m benchmarks.flops --model sd35m --algo nft           a released model with an algorithm's published batch

Forwards follow from the recipe (wfm_ds/training/forward_counts.py), FLOPs of one from the denoiser's operators
(wfm_ds/training/forward_flops.py). Neither weights nor a GPU are needed; a model folder that is not on this disk is
known by its name (released.py).
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

from benchmarks.released import RELEASED, Released
from benchmarks.report import table
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.engine.flops import Flops
from wfm_ds.engine.policies import add_adapters, set_trainable
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.program import run_command
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import RunSizes, derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.model_loading import load_model
from wfm_ds.training.forward_counts import (
    ForwardCount,
    IsGuided,
    count_evaluation,
    count_rl_step,
    count_sft_step,
    denoiser_sigmas,
    guidance_predicate,
    sum_forwards,
)
from wfm_ds.training.forward_flops import count_flops, flops_by_purpose

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
RL = {
    "data": {"kind": "prompts", "path": "prompts"},
    "rollout": {"prompts_per_step": 48, "group_size": 24},
    "reward": {"functions": [{"name": "color"}]},
}
# What `--algo` stands for: the published batch of each algorithm, LoRA of rank 32 where it was published so.
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
class Subject:
    """A model to count: the family, what to call it, and one text's conditioning, given whether text layers froze."""

    title: str
    model: DiffusionModel
    texts: Callable[[bool], Mapping[str, Tensor]]

    @classmethod
    def released(cls, known: Released, max_sequence_length: int | None = None) -> Subject:
        def texts(frozen: bool) -> Mapping[str, Tensor]:
            return known.texts(frozen=frozen, max_sequence_length=max_sequence_length)

        return cls(known.title, known.load(), texts)

    @classmethod
    def of(cls, recipe: Recipe) -> Subject:
        """The recipe's pipeline, or the released model whose folder has its name. ModelError if it is neither."""
        path = Path(recipe.model.path)
        for known in RELEASED.values():
            if path.name == known.folder and not path.exists():
                return cls.released(known, recipe.model.max_sequence_length)
        model = load_model(recipe, torch.device("cpu"))
        return cls(recipe.model.path, model, lambda _: model.encode_text([""]))


def latent_shape(recipe: Recipe, model: DiffusionModel) -> tuple[int, ...]:
    size = recipe.sampling
    try:
        return model.latent_shape(size.height, size.width, size.num_frames)
    except ValueError as error:
        raise RecipeError(f"sampling: {error}") from error


def step_forwards(recipe: Recipe, derived: RunSizes, model: DiffusionModel) -> list[dict[str, ForwardCount]]:
    """Yield the forwards of one rank, by step of the run; one step of SFT stands for all."""
    if not recipe.is_rl:
        return [count_sft_step(recipe, derived)]
    algorithm = build_rl_algorithm(recipe, model.rollout_sigmas(recipe.sampling))
    cheap = recipe.sampling.candidate_sampling
    explored_at = None if cheap is None else model.rollout_sigmas(cheap)[:-1].tolist()
    guided = guidance_predicate(recipe, model.select_expert)
    return [
        count_rl_step(recipe, derived, algorithm, step, guided=guided, exploration_sigmas=explored_at)
        for step in range(1, recipe.run.steps + 1)
    ]


def compared_levels(recipe: Recipe, model: DiffusionModel) -> list[float]:
    """The noise levels of the rollouts that an evaluation compares with; none unless the recipe asks for it."""
    if not recipe.validation.rollout_correlation:
        return []
    return denoiser_sigmas(build_rl_algorithm(recipe, model.rollout_sigmas(recipe.sampling)).plan(1))


def flops_of_sample(recipe: Recipe, subject: Subject) -> Flops:
    """Changes the subject's denoiser: it gets adapters, or all of it trains."""
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


def cost(steps: Sequence[Mapping[str, ForwardCount]], flops: Flops, num_replicas: int) -> list[dict[str, Any]]:
    """One row a purpose, and their sum; means over the steps. Forwards are those of one rank, the rest of all ranks."""
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


def readable(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else with_prefix(value) if key.endswith("FLOP") else f"{value:,.6g}"
        for key, value in row.items()
    }


def with_prefix(flops: float) -> str:
    """`2.44 T`"""
    power = min(max(int(math.log10(flops)) // 3, 0), len(PREFIXES) - 1) if flops else 0
    return f"{flops / 1000**power:.3g} {PREFIXES[power]}".strip()


@dataclass(frozen=True, slots=True)
class Count:
    """A recipe on some ranks, counted."""

    recipe: Recipe
    title: str
    derived: RunSizes
    steps: Sequence[Mapping[str, ForwardCount]]  # of one rank
    flops: Flops
    guided: IsGuided
    guided_steps: int  # of an evaluation's denoise steps
    compared: Sequence[float]  # noise levels of the rollouts that an evaluation compares with

    @classmethod
    def of(cls, recipe: Recipe, subject: Subject, world_size: int) -> Count:
        derived = derive_run_sizes(recipe, world_size)
        grid = subject.model.sigmas(recipe.sampling.eval_steps, latent_shape(recipe, subject.model))
        steps = step_forwards(recipe, derived, subject.model)
        guided, compared = (
            guidance_predicate(recipe, subject.model.select_expert),
            compared_levels(recipe, subject.model),
        )
        guided_steps = sum(map(guided, grid[:-1].tolist()))
        flops = flops_of_sample(recipe, subject)
        return cls(recipe, subject.title, derived, steps, flops, guided, guided_steps, compared)

    def report(self) -> str:
        """The cost of one sample, of an evaluation, and of a step by purpose."""
        recipe, size, flops = self.recipe, self.recipe.sampling, self.flops
        validation = recipe.validation
        num_images = 0 if recipe.is_rl else validation.num_images
        replicas = self.derived.num_replicas
        evaluated = count_evaluation(
            recipe,
            replicas,
            num_prompts=validation.num_prompts,
            num_images=num_images,
            guided_steps=self.guided_steps,
            rollout_sigmas=self.compared,
            guided=self.guided,
        )
        work = sum(w.total for w in flops_by_purpose(evaluated, flops).values()) * replicas
        recomputed = f" and {with_prefix(flops.recompute)}FLOP recomputed" if flops.recompute else ""
        lines = [
            f"{self.title}, {size.height} x {size.width} x {size.num_frames}, {recipe.algorithm.name}, "
            f"{'LoRA' if recipe.lora else 'all weights'}, {self.derived.replicas_text}",
            f"one sample: forward {with_prefix(flops.forward)}FLOP, "
            f"backward {with_prefix(flops.backward)}FLOP{recomputed}",
            f"one evaluation: {with_prefix(work)}FLOP",
            f"one {'RL' if recipe.is_rl else 'optimizer'} step"
            + (f", mean of {len(self.steps)}" if len(self.steps) > 1 else ""),
            "",
            table([readable(row) for row in cost(self.steps, flops, replicas)]),
        ]
        return "\n".join(lines)

    def row(self, name: str, tflops: float | None = None) -> dict[str, str]:
        """The same in one line of a table; with the hours of the run where each GPU reaches `tflops` TFLOP/s."""
        *purposes, total = cost(self.steps, self.flops, self.derived.num_replicas)
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
            "a sample forward": f"{with_prefix(self.flops.forward)}FLOP",
            "and backward": f"{with_prefix(self.flops.backward + self.flops.recompute)}FLOP",
            "a step": f"{with_prefix(step)}FLOP",
            **hours,
        }


def published(algorithm: str, model: Released) -> Recipe:
    """The recipe that `--algo` stands for, at the model's own size."""
    height, width, frames = model.size
    settings = ALGORITHMS[algorithm]
    sampling = {"height": height, "width": width, "num_frames": frames, **settings.get("sampling", {})}
    sections = {"run": {"output_dir": "outputs", "steps": 100}, "model": {"path": model.folder}}
    return Recipe.model_validate({**sections, **settings, "sampling": sampling})


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.flops", description="Count forwards and FLOPs of a step.")
    p.add_argument("words", nargs="*", metavar="RECIPE|section.key=value", help="recipes, and changes to them")
    p.add_argument("--model", choices=RELEASED, help="a released model in place of the recipe's")
    p.add_argument("--algo", choices=ALGORITHMS, help="an algorithm with its published batch, instead of a recipe")
    p.add_argument("--ranks", type=int, default=8, help="GPUs (default: 8)")
    p.add_argument("--tflops", type=float, help="TFLOP/s that a GPU is assumed to reach: adds the hours of the run")
    return p


def run(args: argparse.Namespace) -> None:
    recipes = [word for word in args.words if "=" not in word]
    overrides = [word for word in args.words if "=" in word]
    if bool(recipes) == (args.algo is not None) or (args.algo and not args.model):
        raise UserError("name a recipe, or --model and --algo")
    known = RELEASED[args.model] if args.model else None
    if known is not None and args.algo:
        counts = [Count.of(published(args.algo, known), Subject.released(known), args.ranks)]
    else:
        loaded = [recipe_file.load_recipe(Path(path), overrides) for path in recipes]
        counts = [Count.of(r, Subject.released(known) if known else Subject.of(r), args.ranks) for r in loaded]
    rows = [count.row(Path(path).name, args.tflops) for path, count in zip(recipes, counts, strict=False)]
    sys.stdout.write((table(rows) if len(rows) > 1 or args.tflops else counts[0].report()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
