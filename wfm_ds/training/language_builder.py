"""Builds a vision-language training run, and its `--check` report."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.distributed.accelerator import ranks_per_node
from wfm_ds.distributed.lifecycle import StopFlag, seconds_since_start
from wfm_ds.distributed.world import World
from wfm_ds.engine.adapter_layers import match_linear_layers
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.flop_counter import copy_to_meta, make_trainable
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.engine.zero_values import check_zero_values
from wfm_ds.errors import RecipeError
from wfm_ds.language import attention, sequence_parallel
from wfm_ds.language.annotations import MEDIA_KINDS
from wfm_ds.language.data import LanguageData, load_conversations
from wfm_ds.language.export import LanguageTarget
from wfm_ds.language.flops import SequenceWork
from wfm_ds.language.media import MediaReader
from wfm_ds.language.memory import estimate_language_memory, largest_row_size
from wfm_ds.language.model import LanguageModel, load_language_model, parameter_group
from wfm_ds.language.packed_sequences import ConversationReader, SequencePacker
from wfm_ds.language.renderer import Renderer
from wfm_ds.language.sequence_source import PackingOrder, SequenceSource
from wfm_ds.memory.advice import memory_verdict
from wfm_ds.models.assets.hub import display_name
from wfm_ds.monitoring.trackers import require_trackers
from wfm_ds.recipe.deepspeed import build_deepspeed_config
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.check_report import CheckReport, gpu_memory, start_summary
from wfm_ds.runs.job import open_monitor
from wfm_ds.runs.model_revision import pin_commit
from wfm_ds.runs.output_folder import RunStart, find_run_start
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.language_loop import LanguageJob, LanguageLoop, LanguageValidator

if TYPE_CHECKING:
    from wfm_ds.runs.mirror import Mirror
    from wfm_ds.training.loop import TrainingLoop

log = logging.getLogger(__name__)

OomAdvice = Callable[[Callable[[], str | None]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class LanguageSetup:
    model: LanguageModel
    reader: ConversationReader
    data: LanguageData


def make_sample_reader(recipe: Recipe, model: LanguageModel) -> ConversationReader:
    return ConversationReader(
        Renderer(model.tokenizer, train_on=recipe.language_settings.train_on),
        MediaReader(model.image_processor, recipe.data),
        has_frame_times=model.has_frame_times,
        max_tokens=recipe.data.max_tokens,
        too_long=recipe.data.too_long,
    )


def prepare_language_run(
    recipe: Recipe, world: World, stop: StopFlag, oom_advice: OomAdvice
) -> Callable[[RunStart, Mirror | None, ExitStack], TrainingLoop]:
    """Check the recipe, load model and data, and return a function that builds the training loop.

    All ranks must call this. Nothing is written before the returned function is called.
    """
    return functools.partial(build_language_loop, recipe, world, stop, load_language_setup(recipe, world, oom_advice))


def load_language_setup(recipe: Recipe, world: World, oom_advice: OomAdvice) -> LanguageSetup:
    """Check the settings, load the model, and read the conversations and their token counts.

    All ranks must call this.
    """

    def load_model() -> LanguageModel:
        check_engine_settings(recipe, world.size)
        with oom_advice(lambda: "start"):
            model = load_language_model(recipe.model.path, DTYPES[recipe.model.dtype], recipe.model.revision)
        if recipe.engine.sequence_parallel > 1:
            sequence_parallel.check_sequence_parallel(model.network, recipe.engine.sequence_parallel)
        return model

    log.info("loading model %s", recipe.model.path)
    model: LanguageModel = world.run_checked(load_model)
    log.info("model loaded, %.0f s after the start", seconds_since_start())
    log.info("reading data %s", recipe.data.path)
    reader: ConversationReader = world.run_checked(lambda: make_sample_reader(recipe, model))
    return LanguageSetup(model, reader, load_conversations(recipe, reader, world))


def check_engine_settings(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if engine settings are invalid, or TrackerError if a tracker's package is not installed."""
    require_trackers(recipe)
    build_deepspeed_config(
        recipe,
        accumulation=derive_run_sizes(recipe, world_size).accumulation,
        policies=engine_policy_copies(recipe),
        world_size=world_size,
        ranks_per_node=ranks_per_node(world_size),
    )
    check_zero_values(recipe)


def build_language_loop(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    setup: LanguageSetup,
    start: RunStart,
    mirror: Mirror | None,
    resources: ExitStack,
) -> TrainingLoop:
    """Build the training loop. All ranks must call this.

    resources: ExitStack that closes everything that this function opens.
    """
    model, data, settings = setup.model, setup.data, recipe.language_settings
    derived = derive_run_sizes(recipe, world.size)
    # Every packed sequence gets a blank item of each media kind, because the vision tower must run on all ranks.
    kinds = [kind for kind in MEDIA_KINDS if kind in data.media_kinds] or ["image"]
    blanks = [setup.reader.blank_sample(kind) for kind in MEDIA_KINDS if kind in kinds]
    target = LanguageTarget.from_network(model.network, model.path)
    # Copy the network before it is sharded or gets adapters.
    work = SequenceWork(make_meta_copy(recipe, model), checkpointing=bool(recipe.model.gradient_checkpointing))
    engine = world.run_checked(lambda: build_language_engine(recipe, world, model))
    resumed_at = start.step if start.checkpoint else None
    monitor = open_monitor(recipe, world, resumed_at, "conversations", resources)
    by_sample = settings.loss_scale == "samples"
    job = LanguageJob(
        recipe=recipe,
        run_sizes=derived,
        world=world,
        stop_flag=stop,
        engine=engine,
        monitor=monitor,
        mirror=mirror,
        model=model,
        export_target=target,
        row_maker=SequencePacker(model.rotary_positions, blanks, by_sample=by_sample),
        row_work=work,
    )
    held_out = world.run_checked(lambda: LanguageValidator(job, setup.reader, data.held_out))
    held_out.build_rows()
    source = SequenceSource(
        data,
        make_row_order(recipe, data),
        setup.reader,
        sequences_per_step=derived.samples_per_step,
        workers=recipe.data.workers,
    )
    resources.callback(source.close)
    return LanguageLoop(
        job, source, held_out, Exporter(job), Checkpoints(job), weights_by_sample=by_sample, rejected=data.bad
    )


def make_row_order(recipe: Recipe, data: LanguageData) -> PackingOrder:
    settings = recipe.data
    return PackingOrder(
        data.training.lengths, settings.max_tokens, seed=recipe.run.seed, shuffle=settings.shuffle, pack=settings.pack
    )


def make_meta_copy(recipe: Recipe, model: LanguageModel) -> nn.Module:
    """Return a copy of the network on the meta device, with the recipe's LoRA and with requires_grad as in training."""
    network = copy_to_meta(model.network)
    make_trainable(
        network, recipe, lora_targets(recipe, model), [], model.group_parameter_names(recipe.language_settings.freeze)
    )
    return network


def lora_targets(recipe: Recipe, model: LanguageModel) -> list[str]:
    """Return the layers that get LoRA adapters. Each entry is a layer name or the end of a layer name."""
    return (recipe.lora and recipe.lora.target_modules) or model.default_lora_targets


def build_language_engine(recipe: Recipe, world: World, model: LanguageModel) -> DenoiserEngine:
    """Wrap the network in an engine. All later forward passes must use the engine."""
    derived = derive_run_sizes(recipe, world.size)
    model.uses_segments = world.replica is None and attention.install_segment_attention(model.network)
    engine = DenoiserEngine.build(
        model.network,
        recipe,
        world,
        lora_targets=model.default_lora_targets,
        policies=engine_policy_copies(recipe),
        accumulation=derived.accumulation,
        total_updates=derived.total_updates,
        frozen=model.group_parameter_names(recipe.language_settings.freeze),
        count_flops=False,
        shard_tokens=sequence_parallel.install_sequence_parallel,
        find_part=parameter_group,
    )
    model.forward_module = engine.forward_module
    model.group = None if world.replica is None else world.replica.group
    return engine


def check_language_run(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> CheckReport:
    """Check the recipe of a vision-language run and return the report of `--check`.

    Raises UserError if a check fails.
    """
    recipe = pin_commit(recipe, overwrite=overwrite)
    start = find_run_start(recipe, world_size, overwrite=overwrite)
    ready = load_language_setup(recipe, World.single_process(), lambda _: contextlib.nullcontext())
    if recipe.lora is not None and not match_linear_layers(ready.model.network, lora_targets(recipe, ready.model)):
        suffixes = ", ".join(recipe.lora.target_modules or [])
        raise RecipeError(f"lora.target_modules: no linear layer ends with {suffixes}")
    row = largest_row_size(recipe, ready.data, make_row_order(recipe, ready.data))
    sizes = estimate_language_memory(recipe, ready.model, make_meta_copy(recipe, ready.model), row, world_size)
    facts = {
        "recipe": f"{recipe.algorithm.name}, {'LoRA' if recipe.lora else 'all weights'}",
        "model": f"{display_name(ready.model.path)}, {sizes.num_parameters / 1e9:.3g} billion parameters",
        "data": data_summary(recipe, ready.data),
        "output": start_summary(start),
    }
    judged = memory_verdict(recipe, sizes, gpu_memory())
    return CheckReport(
        facts=facts, run_sizes=derive_run_sizes(recipe, world_size), memory=sizes, trained_part="model", verdict=judged
    )


def language_summary(recipe: Recipe) -> str:
    """Load model and data and return a one-line summary. Raises UserError if one of them cannot be used."""
    ready = load_language_setup(recipe, World.single_process(), lambda _: contextlib.nullcontext())
    return f"{ready.model.config.model_type}, {data_summary(recipe, ready.data)}"


def data_summary(recipe: Recipe, data: LanguageData) -> str:
    """Return the number of conversations, and the tokens and packed sequences of one epoch, as one line."""
    lengths, order = data.training.lengths, make_row_order(recipe, data)
    num_rows = next(k for k in range(len(lengths) + 1) if order.locate(k)[0] > 0)
    return (
        f"{len(lengths)} conversations, {len(data.held_out.lengths)} held out, {sum(data.bad.values())} left out; "
        f"{sum(lengths)} tokens in {num_rows} rows, {sum(lengths) / (num_rows * recipe.data.max_tokens):.0%} full"
    )
