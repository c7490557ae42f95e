"""The data of a recipe: scan it, split off validation samples, choose training sizes, and build batches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wfm_ds.data.batch_reader import BatchReader
from wfm_ds.data.buckets import Buckets, automatic_sizes
from wfm_ds.data.captioned_folder import CaptionedFolder, CosmosFolder
from wfm_ds.data.folder import load_folder
from wfm_ds.data.hf_dataset import HfDataset
from wfm_ds.data.hf_stream import HfStream, StreamSource
from wfm_ds.data.inputs import ActionData, InputReader, load_action_data
from wfm_ds.data.media import load_media
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.preference_pairs import load_pairs
from wfm_ds.data.prompts import load_prompt_file, load_prompts
from wfm_ds.data.samples import NUM_SHOWN, REASONS, Media, Sample, SampleSet, SampleSetMixture
from wfm_ds.data.webdataset import TarShards
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.progress import ProgressDisplay, track_progress
from wfm_ds.errors import DataError, RecipeError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.shared_defaults import user_cache_folder
from wfm_ds.types import Prompt
from wfm_ds.user_class import import_class

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

log = logging.getLogger(__name__)

LatentLookup: TypeAlias = Callable[[Media, Framing], Any]  # returns the cached latents of an image or video, or None


class SizedModel(Protocol):
    """The methods of a model (models/base.py) that determine which sizes are valid."""

    def latent_shape(self, height: int, width: int, num_frames: int, /) -> tuple[int, ...]:
        """Return the latent shape (C,h,w) or (C,T,h,w). Raises ValueError for an unsupported size."""
        ...

    def size_multiple(self, num_frames: int, /) -> int:
        """Return the number that must divide height and width."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The training and validation data of a run.

    For SFT, it consists of captioned images and videos. For RL, it consists of prompts, or of captioned images and
    videos.
    """

    prompts: list[Prompt]  # RL: training prompts; the captions if there are samples
    samples: list[Sample]  # for training
    bad: Mapping[str, Sequence[str]]  # rejected entries of the training data: names by reason (REASONS)
    held_out: list[Sample]  # for the validation loss (SFT) and conditioning frames of validation samples
    validation_prompts: list[Prompt]  # prompts sampled in validation
    actions: ActionData | None = None  # None: the model is not conditioned on actions

    @property
    def num_samples(self) -> int:
        return len(self.samples) + len(self.held_out)


def load_data(recipe: Recipe) -> TrainingData:
    """Load the data of a recipe. Raises DataError if a folder or file is missing, empty or has too many bad entries."""
    data, validation = recipe.data, recipe.validation
    prompts: list[Prompt] = []
    samples: list[Sample] = []
    held_out: list[Sample] = []
    bad: Mapping[str, Sequence[str]] = {}
    if data.streaming:
        HfStream(data)  # validates the dataset before a model is loaded
        if validation.path is not None:
            folder_data = data.model_copy(update={"options": {}})
            held_out = log_scan_result(load_folder(folder_data, Path(validation.path))).samples
    elif data.kind == "prompts":
        prompts = load_prompts(data.folder, data.name, data.split)
    elif recipe.is_rl:
        scan = scan_paths(data, data.shard_patterns, pairs=False)
        samples, bad = scan.epoch_samples(scan.samples), scan.bad
        prompts = [sample.prompt for sample in samples]
        if validation.path is not None:
            held_out = scan_paths(data, [validation.path], pairs=False).samples
    else:
        scan = scan_paths(data, data.shard_patterns, pairs=recipe.algorithm.takes_pairs)
        (samples, held_out), bad = split_samples(scan, recipe), scan.bad
    examples = list_validation_prompts(recipe, prompts, held_out or samples)[: validation.num_prompts]
    actions = load_action_data(recipe, [*samples, *held_out])
    return TrainingData(
        prompts=prompts, samples=samples, bad=bad, held_out=held_out, validation_prompts=examples, actions=actions
    )


def list_validation_prompts(recipe: Recipe, prompts: list[Prompt], samples: Sequence[Sample]) -> list[Prompt]:
    """Return the candidates for validation prompts, from validation.prompts or from the data.

    Validation uses the first validation.num_prompts of them.

    prompts: used if there are no samples. samples: held-out samples, or training samples if none are held out. Raises
    DataError for an invalid prompt file.
    """
    if recipe.validation.prompts:
        return load_prompt_file(recipe.validation.prompts)
    if not samples and not recipe.data.streaming:
        return prompts
    # Samples with equal captions still differ in their conditioning frames or inputs.
    by_id = recipe.algorithm.conditioning_frame_range[1] > 0 or recipe.data.inputs
    unique = {sample.prompt.id if by_id else sample.prompt.text: sample.prompt for sample in samples}
    return list(unique.values())


def split_samples(dataset: SampleSet, recipe: Recipe) -> tuple[list[Sample], list[Sample]]:
    """Return the training samples of one epoch, and the held-out samples.

    Held-out samples come from validation.path. If it is not set, they are split off the training data.
    """
    data, validation = recipe.data, recipe.validation
    if validation.path is not None:
        return dataset.epoch_samples(dataset.samples), scan_paths(
            data, [validation.path], pairs=recipe.algorithm.takes_pairs
        ).samples
    samples, held_out = dataset.split_holdout(validation.holdout)
    if not samples:
        raise DataError(f"{data.path}: validation.holdout {validation.holdout} leaves no training samples: lower it")
    return dataset.epoch_samples(samples), held_out


def scan_paths(data: DataRecipe, paths: Sequence[str], *, pairs: bool) -> SampleSet:
    """Scan the data at these paths and log the rejected entries. Several paths are allowed only for tar shards.

    pairs: whether the algorithm trains on preference pairs. Raises DataError if the data is invalid or does not suit
    the algorithm (see `check_pairs`).
    """
    dataset = build_sample_set(data, paths)
    check_pairs(dataset, pairs)
    return log_scan_result(dataset)


def log_scan_result(dataset: SampleSet) -> SampleSet:
    """Log the notes and rejected entries of a scan result, and return the result."""
    for note in dataset.notes:
        log.warning("%s: %s", dataset.source, note)
    for reason, names in dataset.bad.items():
        log.warning("%s: %d skipped, %s, e.g. %s", dataset.source, len(names), REASONS[reason], names[0])
    return dataset


def check_pairs(dataset: SampleSet, pairs: bool) -> None:
    """Raise DataError if the samples do not suit the algorithm.

    pairs: True if all samples must be preference pairs, False if no sample may be a pair.
    """
    mismatch = next((sample for sample in dataset.samples if (sample.rejected is not None) != pairs), None)
    if mismatch is not None:
        wanted = "a pair: set `rejected`" if pairs else "a single image or video: omit `rejected`"
        raise DataError(f"{dataset.source}: this algorithm needs {mismatch.id} to be {wanted}")


def build_sample_set(data: DataRecipe, paths: Sequence[str]) -> SampleSet:
    if data.is_user_kind:
        return build_user_sample_set(data, paths)
    if data.kind == "pairs":
        return load_pairs(paths, cache_dir=data.cache_dir, max_bad_fraction=data.max_bad_fraction)
    if data.kind == "sets":
        if list(paths) != data.shard_patterns:  # validation.path: one folder
            return load_folder(data, Path(paths[0]))
        return SampleSetMixture(
            {
                name: (build_sample_set(part, part.shard_patterns), weight)
                for name, (part, weight) in data.set_recipes().items()
            }
        )
    if data.kind == "hf":
        return HfDataset(data, paths[0])
    if data.kind == "webdataset":
        return TarShards(paths, cache_dir=data.cache_dir, max_bad_fraction=data.max_bad_fraction)
    (folder,), cache_dir = map(Path, paths), data.cache_dir or user_cache_folder()
    if data.kind == "folder":
        return load_folder(data, folder)
    if data.kind == "cosmos":
        return CosmosFolder(
            folder, allow_pickle=data.allow_pickle, max_bad_fraction=data.max_bad_fraction, cache_dir=cache_dir
        )
    return CaptionedFolder(folder, max_bad_fraction=data.max_bad_fraction, cache_dir=cache_dir)


def build_user_sample_set(data: DataRecipe, paths: Sequence[str]) -> SampleSet:
    """Scan the data with the user's SampleSet class.

    Raises DataError if the class is invalid or rejects data.options.
    """
    key = "data.kind"
    make: Callable[..., SampleSet] = import_class(data.kind, SampleSet, key=key, error=DataError)
    arguments: dict[str, Any] = {"max_bad_fraction": data.max_bad_fraction, **data.options}
    try:
        inspect.signature(make).bind(list(paths), **arguments)
    except TypeError as error:
        raise DataError(f"{key} {data.kind}: data.options do not fit its constructor: {error}") from error
    try:
        dataset: SampleSet = make(list(paths), **arguments)
    except OSError as error:
        raise DataError(f"{key} {data.kind}: {', '.join(paths)} cannot be read: {error}") from error
    dataset.samples.sort(key=lambda sample: sample.id)
    ids = [sample.id for sample in dataset.samples]
    if duplicate := next((current for current, following in itertools.pairwise(ids) if current == following), None):
        raise DataError(f"{key} {data.kind}: two samples have the id {duplicate}; ids must be unique")
    if unknown := sorted(dataset.bad.keys() - REASONS.keys()):
        raise DataError(
            f"{key} {data.kind}: unknown reject reasons {', '.join(unknown)}; valid are {', '.join(REASONS)}"
        )
    return dataset


def build_buckets(recipe: Recipe, model: SizedModel) -> Buckets:
    """Return the training sizes of the recipe. Raises RecipeError for a size that the model does not support."""
    data, size = recipe.data, recipe.sampling
    sizes = [(size.height, size.width)]
    if data.buckets == "auto":
        sizes = automatic_sizes(size.height, size.width, model.size_multiple(size.num_frames))
    elif data.buckets is not None:
        sizes = data.buckets
    for height, width in sizes if data.buckets is not None else ():
        try:
            model.latent_shape(height, width, size.num_frames)
        except ValueError as error:
            raise RecipeError(f"data.buckets: size [{height}, {width}] is not supported: {error}") from error
    num_frames = frames_per_clip(recipe, model)
    framing = Framing(
        height=size.height,
        width=size.width,
        num_frames=num_frames,
        fps=data.fps,
        clip=data.clip,
        crop=data.crop,
        max_upscale=data.max_upscale,
        allow_repeats=data.allow_repeats,
        span=size.num_frames if data.inputs and num_frames < size.num_frames else None,
    )
    return Buckets(framing, sizes)


def trains_on_data(recipe: Recipe) -> bool:
    """Return whether an RL run trains on the dataset in addition to generated samples."""
    algorithm = recipe.rl.algorithm
    return algorithm.num_data_terms(algorithm.terms_per_sample(recipe.sampling)) > 0


def frames_per_clip(recipe: Recipe, model: SizedModel) -> int:
    """Return the number of frames to read per clip.

    It is sampling.num_frames, except for an RL run that trains only on generated samples. Such a run reads only the
    conditioning frames, so that even images can serve as its data.
    """
    size, (_, most) = recipe.sampling, recipe.algorithm.conditioning_frame_range
    if not recipe.is_rl or most == 0 or trains_on_data(recipe):
        return size.num_frames
    num_latents = model.latent_shape(size.height, size.width, size.num_frames)[1]
    return 1 + (most - 1) * (size.num_frames - 1) // max(1, num_latents - 1)


def assign_buckets(samples: Sequence[Sample], buckets: Buckets, world: World, workers: int) -> list[int]:
    """Return the bucket index of each sample.

    Collective: each rank reads the image sizes of its shard of the samples.
    """
    if len(buckets.sizes) == 1:
        return [0] * len(samples)

    def find_bucket(sample: Sample) -> int:
        LIVENESS.record_progress()
        return buckets.choose_bucket(sample.media)

    def measure_shard() -> list[int]:
        with ThreadPoolExecutor(workers) as pool:
            shard = samples[world.rank :: world.size]
            with track_progress(pool.map(find_bucket, shard), "reading sizes", total=len(shard)) as tracked:
                return list(tracked)

    parts = world.gather(world.run_checked(measure_shard))
    indices = [parts[i % world.size][i // world.size] for i in range(len(samples))]
    counts = Counter(indices)
    shares = ", ".join(f"{h} x {w}: {counts[i]}" for i, (h, w) in enumerate(buckets.sizes) if counts[i])
    log.info("samples by size: %s", shares)
    return indices


def find_usable_samples(
    samples: Sequence[Sample],
    recipe: Recipe,
    buckets: Buckets,
    count: int,
    *,
    dataset_size: int,
    what: str = "samples",
    inputs: InputReader | None = None,
) -> list[Sample]:
    """Return the first `count` samples that can be decoded, with the conditioning inputs for their centre crops.

    Bad samples are skipped and logged. Raises DataError if all samples are bad, or if the number of bad samples exceeds
    data.max_bad_fraction of `dataset_size`. what: name of the samples in messages.
    """
    usable, broken = list[Sample](), list[BadMedia]()
    title = f"checking {what}"
    with ProgressDisplay(title, min(count, len(samples))) as display:
        for sample in samples:
            if len(usable) == count:
                break
            LIVENESS.record_progress(title)
            try:
                framing = buckets.choose_framing(sample.media)
                for media in sample.all_media:
                    load_media(media, framing, draw_centre)
                prompt = sample.prompt if inputs is None else inputs.load_prompt(sample, framing, draw_centre)
            except BadMedia as error:
                broken.append(error)
            else:
                usable.append(sample if inputs is None else dataclasses.replace(sample, prompt=prompt))
                display.advance()
    names, allowed = "; ".join(map(str, broken[:NUM_SHOWN])), recipe.data.max_bad_fraction
    if broken and not usable:
        raise DataError(f"all {len(broken)} {what} are invalid; repair at least one: {names}")
    if len(broken) > allowed * dataset_size:
        raise DataError(
            f"{len(broken)} of {len(usable) + len(broken)} tested {what} are invalid, data.max_bad_fraction "
            f"{allowed:g} allows {int(allowed * dataset_size)} of {dataset_size}. First: {names}"
        )
    for bad in broken:
        log.warning("skipped %s", bad)
    return usable


def build_batch_source(
    recipe: Recipe,
    world: World,
    data: TrainingData,
    buckets: Buckets,
    *,
    global_batch: int,
    unit: int,
    cached_latents: LatentLookup | None,
    inputs: InputReader | None = None,
) -> BatchReader:
    """Return the reader of training batches. The caller must close it. Collective.

    global_batch: samples per optimizer step over all ranks. unit: number of consecutive samples that have the same
    size.
    cached_latents: function that returns the cached latents of an image or video, or None if they are not cached.
    """
    if recipe.data.streaming:
        return StreamSource(
            functools.partial(HfStream, recipe.data),
            global_batch=global_batch,
            seed=recipe.run.seed,
            framing=buckets.framings[0],
            max_bad_fraction=recipe.data.max_bad_fraction,
            workers=recipe.data.workers,
            inputs=inputs,
        )
    return BatchSource(
        data.samples,
        global_batch=global_batch,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        framings=buckets.framings,
        buckets=assign_buckets(data.samples, buckets, world, recipe.data.workers),
        unit=unit,
        max_bad_fraction=recipe.data.max_bad_fraction,
        workers=recipe.data.workers,
        rejected={reason: len(data.bad.get(reason, [])) for reason in REASONS},
        cached_latents=cached_latents,
        inputs=inputs,
    )


def log_rejected(data: TrainingData) -> None:
    for reason, names in data.bad.items():
        for name in names:
            log.info("skipped %s: %s (%s)", name, REASONS[reason], reason)
