"""Setup of a vision-language training run, and its `--check` report."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from wfm_ds.algorithms import engine_policies
from wfm_ds.distributed.lifecycle import StopFlag, seconds_since_start
from wfm_ds.distributed.world import World, ranks_per_node
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.flops import on_meta
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.engine.work import make_trainable
from wfm_ds.errors import RecipeError
from wfm_ds.language import attention, sequence
from wfm_ds.language.annotations import KINDS
from wfm_ds.language.data import LanguageData, load_conversations
from wfm_ds.language.export import LanguageTarget
from wfm_ds.language.flops import RowWork
from wfm_ds.language.media import MediaReader
from wfm_ds.language.model import LanguageModel, load, part_of
from wfm_ds.language.packing import RowOrder
from wfm_ds.language.render import Renderer
from wfm_ds.language.rows import RowMaker, SampleReader
from wfm_ds.language.source import RowSource
from wfm_ds.models.hub import name_of
from wfm_ds.monitoring.monitor import Monitor
from wfm_ds.monitoring.trackers.choice import open_trackers, require_trackers
from wfm_ds.recipe.deepspeed import deepspeed_config
from wfm_ds.recipe.derived import derive
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.checked import Checked
from wfm_ds.run.fit import verdict
from wfm_ds.run.folder import Start, find_start
from wfm_ds.run.hub_model import at_commit
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.language import HeldOut, LanguageJob, LanguageLoop
from wfm_ds.training.language_estimate import fullest_row, language_estimate
from wfm_ds.training.preflight import beginning, gpu_memory

if TYPE_CHECKING:
    from wfm_ds.run.mirror import Mirror
    from wfm_ds.training.loop import Loop

log = logging.getLogger(__name__)

Advised = Callable[[Callable[[], str | None]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Ready:
    """A loaded model and its data."""

    model: LanguageModel
    reader: SampleReader
    data: LanguageData


def reader_of(recipe: Recipe, model: LanguageModel) -> SampleReader:
    """Create the reader of the recipe's conversations for this model."""
    return SampleReader(
        Renderer(model.tokenizer, train_on=recipe.language.train_on),
        MediaReader(model.image_processor, recipe.data),
        timed_frames=model.timed_frames,
        max_tokens=recipe.data.max_tokens,
        too_long=recipe.data.too_long,
    )


def prepare(
    recipe: Recipe, world: World, stop: StopFlag, advised: Advised
) -> Callable[[Start, Mirror | None, ExitStack], Loop]:
    """Load and check everything before anything is written. Collective.

    Returns `build_language_loop` with all arguments except the last three.
    """
    return functools.partial(build_loop, recipe, world, stop, made_ready(recipe, world, advised))


def made_ready(recipe: Recipe, world: World, advised: Advised) -> Ready:
    """Check settings, load the model, read the annotations and measure their lengths. Collective."""

    def load_model() -> LanguageModel:
        check_settings(recipe, world.size)
        with advised(lambda: "start"):
            model = load(recipe.model.path, DTYPES[recipe.model.dtype], recipe.model.revision)
        if recipe.engine.sequence_parallel > 1:
            sequence.check(model.network, recipe.engine.sequence_parallel)
        return model

    log.info("loading model %s", recipe.model.path)
    model: LanguageModel = world.checked(load_model)
    log.info("model loaded, %.0f s after the start", seconds_since_start())
    log.info("reading data %s", recipe.data.path)
    reader: SampleReader = world.checked(lambda: reader_of(recipe, model))
    return Ready(model, reader, load_conversations(recipe, reader, world))


def check_settings(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError for invalid engine settings, TrackerError for a tracker that is not installed."""
    require_trackers(recipe)
    deepspeed_config(
        recipe,
        accumulation=derive(recipe, world_size).accumulation,
        policies=engine_policies(recipe),
        world_size=world_size,
        ranks_per_node=ranks_per_node(world_size),
    )


def build_loop(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    ready: Ready,
    start: Start,
    mirror: Mirror | None,
    resources: ExitStack,
) -> Loop:
    """Build the training loop. `resources` closes what it opens. Collective."""
    model, data, settings = ready.model, ready.data, recipe.language
    derived = derive(recipe, world.size)
    # Every packed sequence gets a blank item of each media kind in the data: the vision tower must run on all ranks.
    kinds = [kind for kind in KINDS if kind in data.kinds] or ["image"]
    blanks = [ready.reader.blank(kind) for kind in KINDS if kind in kinds]
    target = LanguageTarget.of(model.network, model.path)
    work = row_work(recipe, model)
    engine = world.checked(lambda: build_engine(recipe, world, model))
    resumed_at = start.step if start.checkpoint else None
    trackers = world.checked(lambda: open_trackers(recipe, resumed_at), on="main")
    monitor = Monitor(
        recipe.run.output_dir,
        is_main=world.is_main,
        console=recipe.logging.console,
        total_steps=recipe.run.steps,
        unit="conversations",
        trackers=trackers or (),
    )
    resources.callback(monitor.close)
    by_sample = settings.loss_scale == "samples"
    job = LanguageJob(
        recipe=recipe,
        derived=derived,
        world=world,
        stop=stop,
        engine=engine,
        monitor=monitor,
        mirror=mirror,
        model=model,
        target=target,
        maker=RowMaker(model.positions, blanks, by_sample=by_sample),
        work=work,
    )
    held_out = world.checked(lambda: HeldOut(job, ready.reader, data.held_out))
    held_out.make_rows()
    source = RowSource(
        data, row_order(recipe, data), ready.reader, rows_per_step=derived.samples_per_step, workers=recipe.data.workers
    )
    resources.callback(source.close)
    return LanguageLoop(job, source, held_out, Exporter(job), Checkpoints(job), by_sample=by_sample, rejected=data.bad)


def row_order(recipe: Recipe, data: LanguageData) -> RowOrder:
    settings = recipe.data
    return RowOrder(
        data.training.lengths, settings.max_tokens, seed=recipe.run.seed, shuffle=settings.shuffle, pack=settings.pack
    )


def row_work(recipe: Recipe, model: LanguageModel) -> RowWork:
    """Create the FLOPs counter. Call before the model is sharded or gets adapters."""
    return RowWork(trained_shadow(recipe, model), checkpointing=recipe.model.gradient_checkpointing)


def trained_shadow(recipe: Recipe, model: LanguageModel) -> nn.Module:
    """Copy the network to the meta device, with the adapters and requires_grad flags that the engine will set."""
    network = on_meta(model.network)
    make_trainable(network, recipe, targets_of(recipe, model), [], model.frozen(recipe.language.freeze))
    return network


def targets_of(recipe: Recipe, model: LanguageModel) -> list[str]:
    """Return the names, or name suffixes, of the layers that get LoRA adapters."""
    return (recipe.lora and recipe.lora.target_modules) or model.default_lora_targets


def build_engine(recipe: Recipe, world: World, model: LanguageModel) -> DenoiserEngine:
    """Wrap the network in an engine. All later forward passes go through the engine."""
    derived = derive(recipe, world.size)
    model.by_segments = world.replica is None and attention.install(model.network)
    engine = DenoiserEngine.build(
        model.network,
        recipe,
        world,
        lora_targets=model.default_lora_targets,
        policies=engine_policies(recipe),
        accumulation=derived.accumulation,
        total_updates=derived.total_updates,
        frozen=model.frozen(recipe.language.freeze),
        counts_work=False,
        share=sequence.install,
        part_of=part_of,
    )
    model.forward_module = engine.forward_module
    model.group = None if world.replica is None else world.replica.group
    return engine


def examine(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Checked:
    """Check a language recipe and return the report of `--check`. Raises UserError if a check fails."""
    recipe = at_commit(recipe, overwrite=overwrite)
    start = find_start(recipe, world_size, overwrite=overwrite)
    ready = made_ready(recipe, World.alone(), lambda _: contextlib.nullcontext())
    if recipe.lora is not None and not adapted(recipe, ready.model):
        suffixes = ", ".join(recipe.lora.target_modules or [])
        raise RecipeError(f"lora.target_modules: no linear layer ends with {suffixes}")
    row = fullest_row(recipe, ready.data, row_order(recipe, ready.data))
    sizes = language_estimate(recipe, ready.model, trained_shadow(recipe, ready.model), row, world_size)
    facts = {
        "recipe": f"{recipe.algorithm.name}, {'LoRA' if recipe.lora else 'all weights'}",
        "model": f"{name_of(ready.model.path)}, {sizes.total / 1e9:.3g} billion parameters",
        "data": counted(recipe, ready.data),
        "output": beginning(start),
    }
    judged = verdict(recipe, sizes, gpu_memory())
    return Checked(facts=facts, derived=derive(recipe, world_size), memory=sizes, of="model", verdict=judged)


def summary(recipe: Recipe) -> str:
    """Load model and data and return a one-line summary. Raises UserError."""
    ready = made_ready(recipe, World.alone(), lambda _: contextlib.nullcontext())
    return f"{ready.model.config.model_type}, {counted(recipe, ready.data)}"


def counted(recipe: Recipe, data: LanguageData) -> str:
    """Return the number of conversations, tokens and packed sequences (first epoch) as text."""
    lengths, order = data.training.lengths, row_order(recipe, data)
    num_rows = next(k for k in range(len(lengths) + 1) if order.place(k)[0] > 0)
    return (
        f"{len(lengths)} conversations, {len(data.held_out.lengths)} held out, {sum(data.bad.values())} left out; "
        f"{sum(lengths)} tokens in {num_rows} rows, {sum(lengths) / (num_rows * recipe.data.max_tokens):.0%} full"
    )


def adapted(recipe: Recipe, model: LanguageModel) -> list[str]:
    """Return the modules that match the LoRA targets."""
    assert recipe.lora is not None
    targets = targets_of(recipe, model)
    names = [name for name, _ in model.network.named_modules()]
    return [name for name in names if any(name == t or name.endswith(f".{t}") for t in targets)]
