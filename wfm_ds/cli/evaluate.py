"""`wfm evaluate`: compare models on the same prompts and seeds, with paired statistics and a verdict.

The exit code is 3 if a model gets the verdict named by --fail-on. For other exit codes see `program.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.cli.sampling_options import (
    KEY_OPTIONS,
    add_sampling_options,
    iterate_samples,
    load_sampler,
    memory_advice,
    parse_positive,
    require_empty,
    sampling_summary,
)
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser

if TYPE_CHECKING:
    from wfm_ds.cli.evaluation_models import EvaluatedModel
    from wfm_ds.evaluation.diversity import SampleEmbedder
    from wfm_ds.evaluation.paired_statistics import Array
    from wfm_ds.evaluation.results import EvaluationResults, ModelResults, TrainedRewards
    from wfm_ds.models.sampler import Sampler
    from wfm_ds.monitoring.samples import GeneratedSample
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
    from wfm_ds.rollout.rewards import RewardClient
    from wfm_ds.types import Prompt, Score

PAGE_FILE, JSON_FILE, CSV_FILE = "index.html", "evaluation.json", "evaluation.csv"
VERDICT_EXIT_CODE = 3  # exit code if a model gets the verdict named by --fail-on
VERDICTS = ("hacked", "improved", "unconfirmed", "no gain", "cannot tell")
SAMPLING_OPTIONS = {  # {option: key of the recipe section `sampling` that provides its default}
    "height": "height",
    "width": "width",
    "frames": "num_frames",
    "fps": "fps",
    "steps": "eval_steps",
    "grid": "eval_grid",
    "shift": "grid_shift",
    "solver": "eval_solver",
    "guidance": "guidance_scale",
    "guidance_low": "guidance_scale_low",
    "guidance_batch": "guidance_batch",
    "negative_prompt": "negative_prompt",
}
MODEL_OPTIONS = (
    *("max_sequence_length", "prompt_template", "guardrail", "family", "vae_dtype", "attention"),
    "embedded_guidance",
)
MAX_PROMPT_BATCH = 8  # samples of a prompt that are generated together by default
MAX_SCORING_BATCH = 16  # samples per reward request


def parser() -> CommandParser:
    p = CommandParser(
        prog="wfm evaluate",
        description="Generate samples from several models with the same prompts and seeds, score them, and compare "
        "each model with the first: confidence intervals over prompts, diversity, and a verdict on reward hacking.",
        epilog="Example: %(prog)s tiny:sd3 outputs/mine --prompts prompts.txt --rewards color --held-out "
        "jpeg_compressibility --seeds 4. Size, steps and guidance default to those of the run's recipe.",
    )
    p.add_argument(
        "models",
        nargs="+",
        metavar="MODEL_OR_EXPORT",
        help="first the base model: a pipeline folder, owner/name on the Hub, or tiny:FAMILY; then exports "
        "(safetensors/step_N, ../lora, s3://...) or runs. For a single LoRA or run, the base is added automatically",
    )
    p.add_argument("--prompts", metavar="FILE", type=Path, required=True, help="one prompt per line (.txt), or .jsonl")
    p.add_argument("--rewards", metavar="A,B", type=parse_names, help="rewards to measure (default: those of the run)")
    p.add_argument(
        "--held-out", metavar="C,D", type=parse_names, default=[], help="held-out rewards, not used for training"
    )
    p.add_argument(
        "--reward-device",
        type=parse_device,
        default="cpu",
        metavar="DEVICE",
        help="device of the rewards, e.g. cuda:1 (default cpu)",
    )
    p.add_argument("--judges", dest="held_out", type=parse_names, help=argparse.SUPPRESS)  # former name of --held-out
    p.add_argument(
        "--seeds", type=parse_positive, default=4, metavar="N", help="seeds 0 to N-1 for each prompt (default 4)"
    )
    p.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("evaluation"), help="a new or empty folder (default evaluation)"
    )
    p.add_argument(
        "--diversity",
        default="auto",
        metavar="EYE",
        help="embedding for the diversity: rgb, folder of an image model, or auto (DINOv2)",
    )
    p.add_argument(
        "--fail-on",
        choices=VERDICTS,
        metavar="VERDICT",
        help=f"exit with code {VERDICT_EXIT_CODE} on this verdict, e.g. hacked",
    )
    p.add_argument(
        "--timeout", type=parse_positive, default=600, metavar="S", help="seconds to wait for scores (default 600)"
    )
    p.add_argument("--revision", help="branch, tag or commit of the first model on the Hub (default main)")
    add_sampling_options(p, requires_size=False, default_batch=f"the seeds of a prompt, at most {MAX_PROMPT_BATCH}")
    p.set_defaults(
        **dict.fromkeys(("batch", *SAMPLING_OPTIONS, *MODEL_OPTIONS))
    )  # unset: from the recipe, else from wfm generate
    p.key_options = {**KEY_OPTIONS, "model.path": "MODEL"}
    return p


def parse_names(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be a list of distinct names")
    return parts


def parse_device(text: str) -> str:
    from wfm_ds.recipe.section import check_device_name

    try:
        return check_device_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.logs import quiet_libraries

    quiet_libraries()  # before the imports, during which they log most
    choose_accelerator()
    from wfm_ds.cli.evaluation_models import resolve_models
    from wfm_ds.data.prompts import load_prompt_file

    prompts = load_prompt_file(args.prompts)
    require_empty(args.out)
    with contextlib.ExitStack() as stack:
        entries = resolve_models(args.models, args.out.absolute(), args.revision, stack)
        recipe = next((entry.recipe for entry in entries if entry.recipe is not None), None)
        fill_options(args, entries, recipe)
        functions = select_functions(args, entries, prompts)
        evaluation = evaluate_models(args, entries, prompts, functions)
    write_report(args.out, evaluation)
    return VERDICT_EXIT_CODE if any(other.verdict.name == args.fail_on for other in evaluation.comparisons) else 0


def fill_options(args: argparse.Namespace, entries: Sequence[EvaluatedModel], recipe: Recipe | None) -> None:
    """Set omitted options in `args` from the recipe, or else to the defaults of `wfm generate`.

    Options that the recipe does not set come from the call.json of the trained models or of the base model. Raises
    UserError if the pipeline has no default size, or if the options do not fit together.
    """
    from wfm_ds.cli.call_defaults import fill_from_call
    from wfm_ds.models import registry

    defaults = argparse.ArgumentParser()
    add_sampling_options(defaults)
    values: dict[str, Any] = {name: defaults.get_default(name) for name in (*SAMPLING_OPTIONS, *MODEL_OPTIONS)}
    if recipe is not None:
        values |= {name: getattr(recipe.sampling, key) for name, key in SAMPLING_OPTIONS.items()}
        values |= {name: getattr(recipe.model, name) for name in MODEL_OPTIONS}
        is_even = (args.grid or values["grid"]) == "even"
        if not is_even:  # the shift is that of the rollouts
            values["shift"] = None
        if values["solver"] == ("dpm2" if is_even else "cps"):  # --grid is not that of the recipe
            values["solver"] = None
    values["batch"] = min(args.seeds, MAX_PROMPT_BATCH)
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    folders = [
        entry.lora or registry.resolve_pipeline(entry.model, args.family, entry.revision, weights=False)
        for entry in (*entries[1:], entries[0])
    ]
    call = fill_from_call(args, entries[0].model, folders[-1], folders)
    for name in ("height", "width"):
        if getattr(args, name) is None and call.get(name) is None:
            raise UserError(
                f"--{name} is required: no run recipe found, and {entries[0].argument}/call.json has no {name}"
            )
        setattr(args, name, getattr(args, name) or call[name])


def select_functions(
    args: argparse.Namespace, entries: Sequence[EvaluatedModel], prompts: Sequence[Prompt]
) -> dict[str, RewardFunction]:
    """Return {reward name: settings} for the rewards in --rewards and --held-out.

    The default of --rewards and all reward options come from the runs. Raises UserError if a reward is unknown
    or cannot score these prompts, if runs use different options for it, or if a held-out reward was used for training.
    """
    from wfm_ds.models import registry
    from wfm_ds.recipe.sections import RewardFunction
    from wfm_ds.training.preflight import check_reward_needs
    from wfm_reward import registry as rewards

    known: dict[str, RewardFunction] = {}
    for entry in entries:
        for function in run_functions(entry.recipe):
            if known.setdefault(function.name, function).options != function.options:
                raise UserError(
                    f"{entry.argument}: its run uses other options for {function.name}: evaluate the runs separately"
                )
    trained = {name for entry in entries for name in training_reward_names(entry.recipe)}
    reward_names = list(known) if args.rewards is None else args.rewards
    if not reward_names:
        raise UserError("--rewards is required, e.g. --rewards pickscore; see wfm rewards")
    for name in args.held_out:
        if name in (trained or reward_names):
            raise UserError(f"--held-out: {name} was used for training, so it is not held out: move it to --rewards")
    functions: dict[str, RewardFunction] = {}
    video = registry.find_family(
        registry.resolve_pipeline(entries[0].model, args.family, entries[0].revision), args.family
    ).is_video
    for name in dict.fromkeys([*reward_names, *args.held_out]):
        rewards.get_reward_class(name)
        options = known[name].options if name in known else {}
        functions[name] = RewardFunction(name=name, options=options, device=args.reward_device)
        check_reward_needs(functions[name], prompts, is_local=True, makes_video=video)
    return functions


def run_functions(recipe: Recipe | None) -> list[RewardFunction]:
    return [] if recipe is None or recipe.reward is None else recipe.reward.functions


def training_reward_names(recipe: Recipe | None) -> list[str]:
    return [function.name for function in run_functions(recipe) if function.weight != 0]


def evaluate_models(
    args: argparse.Namespace,
    entries: Sequence[EvaluatedModel],
    prompts: Sequence[Prompt],
    functions: Mapping[str, RewardFunction],
) -> EvaluationResults:
    """Generate and score the samples of one model after another, with one model in memory at a time."""
    import torch

    from wfm_ds.evaluation.diversity import load_embedder
    from wfm_ds.evaluation.results import compare_models
    from wfm_ds.memory.advice import explain_out_of_memory
    from wfm_ds.models.assets.loading import select_device

    device = select_device(args.device)
    eye = load_embedder(args.diversity, device)
    measured: list[ModelResults] = []
    settings: dict[str, str] = {}
    with open_reward_client(list(functions.values()), args.timeout) as rewards:
        for entry in entries:
            with explain_out_of_memory(device, lambda phase: memory_advice(args, device), lambda: None):
                check_text_only(args, entry)
                sys.stderr.write(f"loading {entry.argument}\n")
                options = {"model": entry.model, "pipeline": None, "lora": entry.lora, "revision": entry.revision}
                sampler = load_sampler(argparse.Namespace(**{**vars(args), **options}))
                sampler.model.check_prompts([prompt.text for prompt in prompts])
                settings = {"sampling": sampling_summary(sampler.settings), "solver": sampler.eval_solver}
                settings |= {"dtype": str(sampler.model.dtype).removeprefix("torch."), "prompts": args.prompts.name}
                measured.append(measure_model(args, entry, sampler, rewards, eye, prompts))
            del sampler
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    base, *others = measured
    return compare_models(
        prompts=prompts,
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


def check_text_only(args: argparse.Namespace, entry: EvaluatedModel) -> None:
    """Raise UserError if a model requires inputs other than text. Does not load the model's weights."""
    from wfm_ds.models import registry

    folder = registry.resolve_pipeline(entry.model, args.family, entry.revision, weights=False)
    family = registry.find_family(folder, args.family)
    needs = [name for name, spec in family.input_specs.items() if spec.required]
    needs += ["a first frame"] if family.needs_first_frame(folder) else []
    if needs:
        raise UserError(
            f"{entry.argument}: {family.family} needs {', '.join(needs)}, but wfm evaluate supports only text prompts; "
            "use the validation of a run"
        )


@contextlib.contextmanager
def open_reward_client(functions: Sequence[RewardFunction], timeout_s: float) -> Iterator[RewardClient]:
    """Start a reward service and yield a client for it.

    Raises RewardError, and keeps the service's log file, if the service fails to start.
    """
    from wfm_ds.recipe.sections import RewardRecipe
    from wfm_ds.rollout.reward_service import RewardService
    from wfm_ds.rollout.rewards import RewardClient

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
    prompts: Sequence[Prompt],
) -> ModelResults:
    """Generate, write and score one sample per prompt and seed. Raises UserError if files cannot be written.

    A batch is scored while the next one is generated.
    """
    import numpy as np

    from wfm_ds.distributed.progress import show_wait, track_progress
    from wfm_ds.evaluation.diversity import prompt_diversity
    from wfm_ds.evaluation.results import ModelResults
    from wfm_ds.monitoring.samples import write_sample_file, write_table
    from wfm_ds.rollout.rewards import submit_finite_samples

    items = [(prompt, seed) for prompt in prompts for seed in range(args.seeds)]
    folder = args.out / entry.name
    failures: dict[str, dict[str, Score]] = {}
    lines: list[dict[str, Any]] = []
    sizes: list[tuple[int, int]] = []
    vectors: list[Array | None] = []
    pending: list[tuple[GeneratedSample, bool]] = []
    folder.mkdir(parents=True, exist_ok=True)
    generated = iterate_samples(sampler, items, args.batch)
    with track_progress(generated, f"generating samples of {entry.name}", total=len(items)) as tracked:
        for number, (sample, finite) in enumerate(tracked, 1):
            lines.append(write_sample_file(folder, len(lines), sample))
            sizes.append((sample.frames.shape[1], sample.frames.shape[2]))
            vectors.append(eye.embed(sample.frames) if finite else None)
            pending.append((sample, finite))
            if len(pending) == MAX_SCORING_BATCH or number == len(items) or number % args.batch == 0:
                indices = range(number - len(pending), number)
                failures |= submit_finite_samples(
                    rewards,
                    np.stack([sample.pixels for sample, _ in pending]),
                    [finite for _, finite in pending],
                    list(map(str, indices)),
                    [items[index][0] for index in indices],
                    sample.fps,
                )
                pending = []
    with show_wait("waiting for the rewards"):
        scores = rewards.wait() | failures
    samples = [scores[str(index)] for index in range(len(items))]
    values = [{name: score.value for name, score in sample.items()} for sample in samples]
    write_table(folder, [{**line, "rewards": value} for line, value in zip(lines, values, strict=True)])
    return ModelResults(
        name=entry.name,
        path=entry.argument,
        files=[f"{entry.name}/{line['file']}" for line in lines],
        sizes=sizes,
        samples=samples,
        diversity=prompt_diversity(vectors, args.seeds) if args.seeds > 1 else None,
    )


def training_rewards(
    recipe: Recipe | None, args: argparse.Namespace, measured: Sequence[str], base: ModelResults
) -> TrainedRewards:
    """Return the rewards that a model was trained on. They come from its recipe or, without one, from --rewards.

    measured: names of all measured rewards. base: results of the base model.
    """
    from wfm_ds.evaluation.results import TrainedRewards, scores_by_reward, unit_std_reward_recipe
    from wfm_reward.registry import get_reward_class

    names = training_reward_names(recipe) if recipe is not None else list(args.rewards or [])
    measured_names = [name for name in names if name in measured]
    reward: RewardRecipe | None = None
    if recipe is not None and recipe.reward is not None and measured_names:
        functions = [function for function in recipe.reward.functions if function.name in measured_names]
        reward = recipe.reward.model_copy(update={"functions": functions})
    elif measured_names:
        reward = unit_std_reward_recipe(measured_names, scores_by_reward(base.samples, args.seeds))
    backbones = {get_reward_class(name).backbone for name in names} - {""}
    related = frozenset(name for name in measured if name not in names and get_reward_class(name).backbone in backbones)
    return TrainedRewards(names=names, reward=reward, related=related)


def write_report(out: Path, evaluation: EvaluationResults) -> None:
    from wfm_ds.evaluation.report import format_csv, format_json, format_text, render_page
    from wfm_ds.storage import atomic

    for name, content in (
        (CSV_FILE, format_csv(evaluation)),
        (JSON_FILE, format_json(evaluation)),
        (PAGE_FILE, render_page(evaluation)),
    ):
        atomic.write_text(out / name, content)
    sys.stdout.write(f"{format_text(evaluation)}\nwrote {out / PAGE_FILE}, {JSON_FILE}, {CSV_FILE}\n")
