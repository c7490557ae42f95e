"""The work of `wfm evaluate`, which imports torch."""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wfm_ds.cli.evaluation_models import EvaluatedModel, resolve_models
from wfm_ds.cli.evaluation_samples import EvaluationData, SampleScoring, load_data_recipe
from wfm_ds.cli.evaluation_settings import fill_options, select_functions, training_rewards
from wfm_ds.cli.samplers import choose_layout, iterate_samples, load_sampler, memory_advice, sampling_summary
from wfm_ds.data.prompts import load_prompt_file
from wfm_ds.distributed.progress import show_wait, track_progress
from wfm_ds.errors import UserError
from wfm_ds.evaluation.clip_curves import average_clips
from wfm_ds.evaluation.clip_report import format_clips_csv
from wfm_ds.evaluation.diversity import SampleEmbedder, load_embedder, prompt_diversity
from wfm_ds.evaluation.paired_statistics import Array
from wfm_ds.evaluation.report import format_csv, format_json, format_text, render_page
from wfm_ds.evaluation.results import EvaluationResults, ModelResults, compare_models
from wfm_ds.memory.advice import explain_out_of_memory
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import select_device
from wfm_ds.models.sampler import Sampler
from wfm_ds.monitoring.samples import write_sample_file, write_table
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.runs.generation_inputs import check_source_inputs, find_prompt_images, load_prompt_images
from wfm_ds.storage import atomic
from wfm_ds.training.validation_frames import ValidationSamples
from wfm_ds.types import SOURCES, Prompt

PAGE_FILE, JSON_FILE, CSV_FILE, CLIPS_FILE = "index.html", "evaluation.json", "evaluation.csv", "clips.csv"


def run_comparison(args: argparse.Namespace) -> EvaluationResults:
    data_recipe = None if args.data is None else load_data_recipe(args.data)
    prompts = load_prompt_file(args.prompts) if args.data is None else []
    with contextlib.ExitStack() as stack:
        entries = resolve_models(args.models, args.out.absolute(), args.revision, stack)
        recipe = next((entry.recipe for entry in entries if entry.recipe is not None), None)
        fill_options(args, entries, data_recipe or recipe)
        data = None if data_recipe is None else EvaluationData.load(data_recipe, args)
        if data is not None:
            prompts = data.data.validation_prompts
        functions = select_functions(args, entries, prompts, data, list_inputs(args, prompts, data))
        if data is None:
            for entry in entries:
                check_prompt_inputs(args, entry, prompts)
        evaluation = evaluate_models(args, entries, prompts, functions, data)
    write_report(args.out, evaluation)
    return evaluation


def evaluate_models(
    args: argparse.Namespace,
    entries: Sequence[EvaluatedModel],
    prompts: Sequence[Prompt],
    functions: Mapping[str, RewardFunction],
    data: EvaluationData | None,
) -> EvaluationResults:
    device = select_device(args.device)
    eye = load_embedder(args.diversity, device)
    measured: list[ModelResults] = []
    settings: dict[str, str] = {}
    chosen: Sequence[Prompt] = ()  # prompts of the samples
    key: object = None  # prompt ids and clip layout of the samples, equal for all models
    with open_reward_client(list(functions.values()), args.timeout) as rewards:
        for entry in entries:
            with explain_out_of_memory(device, lambda phase: memory_advice(args, device), lambda: None):
                sys.stderr.write(f"loading {entry.argument}\n")
                options = {"model": entry.model, "pipeline": None, "lora": entry.lora, "revision": entry.revision}
                inputs = list_inputs(args, prompts, data)
                sampler = load_sampler(argparse.Namespace(**{**vars(args), **options}), inputs)
                sampler.model.check_prompts([prompt.text for prompt in prompts])
                samples = choose_samples(args, sampler, prompts, data)
                same = [prompt.id for prompt in samples.prompts], samples.layout  # to compare sample by sample
                if measured and same != key:
                    raise UserError(f"{entry.argument} cannot use the same samples and clips as {entries[0].argument}")
                key, chosen, settings = same, samples.prompts, sampling_settings(args, sampler)
                measured.append(measure_model(args, entry, sampler, rewards, eye, samples))
            del sampler, samples  # both hold the model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    base, *others = measured
    return compare_models(
        prompts=chosen,
        seeds=list(range(args.seeds)),
        rewards=list(functions),
        base=base,
        others=[
            (other, training_rewards(entry.recipe, args, list(functions), base))
            for other, entry in zip(others, entries[1:], strict=True)
        ],
        embedder_name=eye.name,
        settings=settings,
    )


def choose_samples(
    args: argparse.Namespace, sampler: Sampler, prompts: Sequence[Prompt], data: EvaluationData | None
) -> ValidationSamples:
    if data is not None:
        return data.choose_samples(sampler)
    prompts = load_prompt_images(sampler, prompts, find_prompt_images(prompts, args.prompts))
    return ValidationSamples(prompts=prompts, layout=choose_layout(sampler, args.clips))


def sampling_settings(args: argparse.Namespace, sampler: Sampler) -> dict[str, str]:
    return {
        "sampling": sampling_summary(sampler.settings),
        "solver": sampler.eval_solver,
        "dtype": str(sampler.model.dtype).removeprefix("torch."),
        **({"clips": str(args.clips)} if args.clips > 1 else {}),
        **({"prompts": args.prompts.name} if args.data is None else {"data": args.data.name}),
    }


def list_inputs(args: argparse.Namespace, prompts: Sequence[Prompt], data: EvaluationData | None) -> list[str]:
    """Return the names of the inputs that all samples have, in addition to texts and frames."""
    if data is not None:
        return [*data.recipe.data.inputs, *data.recipe.data.reward_inputs]
    return list(find_prompt_images(prompts, args.prompts)[0])


def check_prompt_inputs(args: argparse.Namespace, entry: EvaluatedModel, prompts: Sequence[Prompt]) -> None:
    """Raise UserError unless the inputs that the prompt file provides fit the model."""
    folder = registry.resolve_pipeline(entry.model, args.family, entry.revision, weights=False)
    family = registry.find_family(folder, args.family)
    check_source_inputs(family, entry.argument, list_inputs(args, prompts, None), str(args.prompts))
    needs = [name for name, spec in family.input_specs.items() if spec.required and name not in SOURCES]
    needs += ["a first frame"] if family.needs_first_frame(folder) else []
    if needs:
        raise UserError(
            f"{entry.argument}: {family.family} needs {', '.join(needs)}, but --prompts has only texts: use --data "
            "with a recipe"
        )


@contextlib.contextmanager
def open_reward_client(functions: Sequence[RewardFunction], timeout_s: float) -> Iterator[RewardClient]:
    """Start a reward service and yield a client for it. Raises RewardError if the service fails to start."""
    reward = RewardRecipe(functions=list(functions), timeout_s=timeout_s, start_timeout_s=timeout_s)
    folder = Path(tempfile.mkdtemp(prefix="wfm-evaluate-"))
    with RewardService(reward, folder) as service:
        client = RewardClient(service.endpoint, reward, run="evaluate", client="evaluate")
        try:
            yield client
        finally:
            client.close()
    shutil.rmtree(folder, ignore_errors=True)


def measure_model(
    args: argparse.Namespace,
    entry: EvaluatedModel,
    sampler: Sampler,
    rewards: RewardClient,
    eye: SampleEmbedder,
    samples: ValidationSamples,
) -> ModelResults:
    items = [(prompt, seed) for prompt in samples.prompts for seed in range(args.seeds)]
    folder = args.out / entry.name
    scoring = SampleScoring(rewards, samples, sampler, args.clips)
    load_frames = None if samples.frames is None else samples.frames.load_frames
    lines: list[dict[str, Any]] = []
    sizes: list[tuple[int, int]] = []
    vectors: list[Array | None] = []
    folder.mkdir(parents=True, exist_ok=True)
    generated = iterate_samples(sampler, items, args.batch, load_frames, samples.layout, args.clips)
    with track_progress(generated, f"generating samples of {entry.name}", total=len(items)) as tracked:
        for number, (sample, clips) in enumerate(tracked, 1):
            lines.append(write_sample_file(folder, len(lines), sample))
            sizes.append((sample.frames.shape[1], sample.frames.shape[2]))
            vectors.append(eye.embed(sample.frames) if clips[-1].is_finite else None)
            scoring.add(number - 1, items[number - 1][0], clips)
            if number == len(items) or number % args.batch == 0:
                scoring.submit()
    with show_wait("waiting for the rewards"):
        by_clip = scoring.collect(len(items))
    scores = [average_clips(clips) for clips in zip(*by_clip, strict=True)]
    values = [{name: score.value for name, score in sample.items()} for sample in scores]
    write_table(folder, [{**line, "rewards": value} for line, value in zip(lines, values, strict=True)])
    return ModelResults(
        name=entry.name,
        path=entry.argument,
        files=[f"{entry.name}/{line['file']}" for line in lines],
        sizes=sizes,
        samples=scores,
        diversity=prompt_diversity(vectors, args.seeds) if args.seeds > 1 else None,
        clips=by_clip if args.clips > 1 or samples.recordings is not None else (),
        images=[{name: f"{entry.name}/{file}" for name, file in line.get("images", {}).items()} for line in lines],
    )


def write_report(out: Path, evaluation: EvaluationResults) -> None:
    files = {PAGE_FILE: render_page(evaluation), JSON_FILE: format_json(evaluation), CSV_FILE: format_csv(evaluation)}
    if evaluation.base.clips:
        files[CLIPS_FILE] = format_clips_csv(evaluation)
    for name, content in files.items():
        atomic.write_text(out / name, content)
    _, *others = files
    sys.stdout.write(f"{format_text(evaluation)}\nwrote {out / PAGE_FILE}, {', '.join(others)}\n")
