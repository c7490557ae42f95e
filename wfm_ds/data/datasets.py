"""The data of a recipe: scan it, split off validation samples, choose training sizes, and build batches."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wfm_ds.data.action_data import ActionData, load_action_data
from wfm_ds.data.batch_reader import BatchReader
from wfm_ds.data.buckets import Buckets, automatic_sizes
from wfm_ds.data.folder import load_folder
from wfm_ds.data.folder_layout import detect_layout, is_lerobot
from wfm_ds.data.hf_stream import HfStream, StreamSource
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.lerobot import split_windows
from wfm_ds.data.media import load_media
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.prompts import load_prompt_file, load_prompts
from wfm_ds.data.sample_sets import log_scan_result, scan_paths
from wfm_ds.data.samples import NUM_SHOWN, REASONS, Media, Sample, SampleSet
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.progress import ProgressDisplay, track_progress
from wfm_ds.errors import DataError, RecipeError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.filesystem import is_remote
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

log = logging.getLogger(__name__)

LatentLookup: TypeAlias = Callable[[Media, Framing], Any]  # returns the cached latents of an image or video, or None


class SizedModel(Protocol):
    """The methods of a model that determine which image and video sizes are valid."""

    def latent_shape(self, height: int, width: int, num_frames: int, /) -> tuple[int, ...]:
        """Return the latent shape: (C,h,w), or (C,T,h,w) for videos. Raises ValueError for an unsupported size."""
        ...

    def size_multiple(self, num_frames: int, /) -> int:
        """Return the number that must divide height and width."""
        ...

    @property
    def clip_sound_rate(self) -> int | None:
        """Samples per second of the sound that the model is trained on; None: no sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The training and validation data of a run: captioned images and videos, or, only for RL, prompts."""

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
            held_out = log_scan_result(load_streaming_validation(data, Path(validation.path))).samples
    elif data.kind == "prompts":
        prompts = load_prompts(data.folder, data.name, data.split)
    else:
        scan = scan_paths(data, data.shard_patterns, pairs=recipe.algorithm.takes_pairs)
        (samples, held_out), bad = split_samples(scan, recipe), scan.bad
        prompts = [sample.prompt for sample in samples] if recipe.is_rl else []
    examples = list_validation_prompts(recipe, prompts, held_out or samples)[: validation.num_prompts]
    actions = load_action_data(recipe, samples, held_out)
    return TrainingData(
        prompts=prompts, samples=samples, bad=bad, held_out=held_out, validation_prompts=examples, actions=actions
    )


def load_streaming_validation(data: DataRecipe, folder: Path) -> SampleSet:
    """Scan the folder validation.path of a streamed dataset. Raises DataError."""
    layout, changes = detect_layout(folder), dict[str, Any](options={})
    if layout.kind != "hf":  # a caption table has other columns
        changes |= {"image_column": None, "input_columns": {}}
    return load_folder(data.model_copy(update=changes), folder, layout)


def list_validation_prompts(recipe: Recipe, prompts: list[Prompt], samples: Sequence[Sample]) -> list[Prompt]:
    """Return the candidates for validation prompts, from validation.prompts or from the data.

    prompts: the run's prompts; used if there are no samples. samples: held-out samples, or training samples if none are
    held out. Raises DataError if the prompt file is invalid.
    """
    if recipe.validation.prompts:
        loaded = load_prompt_file(recipe.validation.prompts)
        return [dataclasses.replace(prompt, viewpoint=recipe.data.viewpoint) for prompt in loaded]
    if not samples and not recipe.data.streaming:
        return prompts
    # Samples with equal captions still differ in their conditioning frames or inputs.
    by_id = recipe.algorithm.conditioning_frame_range[1] > 0 or recipe.data.inputs
    unique = {sample.prompt.id if by_id else sample.prompt.text: sample.prompt for sample in samples}
    return list(unique.values())


def split_samples(dataset: SampleSet, recipe: Recipe) -> tuple[list[Sample], list[Sample]]:
    """Return the training samples of one epoch, and the held-out samples.

    Held-out samples come from validation.path or validation.episodes. If neither is set, they are split off the
    training data, except in RL. Training episodes are split into windows, and a mixture repeats samples. Raises
    DataError if no training samples remain.
    """
    data, validation, source = recipe.data, recipe.validation, choose_held_out_source(recipe)
    if source is None and not recipe.is_rl:
        samples, held_out = dataset.split_holdout(validation.holdout)
        if not samples:
            raise DataError(
                f"{data.path}: validation.holdout {validation.holdout} leaves no training samples: lower it"
            )
    else:
        held_out = [] if source is None else scan_paths(*source, pairs=recipe.algorithm.takes_pairs).samples
        names = {sample.media.name for sample in held_out if sample.rows is not None}
        samples = [sample for sample in dataset.samples if sample.media.name not in names]
        if names and not samples:
            raise DataError(
                "all training samples are also validation samples: change data.episodes or validation.episodes"
            )
    num_clips = 1 + (recipe.rl.rollout.history.clips if recipe.is_rl else 0)
    if not held_out:
        num_clips = max(num_clips, validation.clips)
    windows = split_windows(samples, num_clips * recipe.sampling.num_frames, data.fps)
    return dataset.epoch_samples(windows), held_out


def choose_held_out_source(recipe: Recipe) -> tuple[DataRecipe, list[str]] | None:
    """Return (recipe, paths) of validation.path or validation.episodes. Returns None if neither is set.

    If the training data is a mixture, validation.path is read as a folder, or as LeRobot data if it is remote or
    contains LeRobot datasets. LeRobot videos then use the `views` of the mixture's first LeRobot data set.
    """
    data, validation = recipe.data, recipe.validation
    if validation.path is None and validation.episodes is None:
        return None
    changes: dict[str, Any] = {"episodes": validation.episodes} if data.kind == "lerobot" else {}
    if validation.path is None:
        return data.model_copy(update=changes), data.shard_patterns
    if not data.is_user_kind:
        changes["options"] = {key: value for key, value in data.options.items() if key != "revision"}
    if data.kind == "sets":
        changes |= {"kind": "folder", "sets": None}
        if is_remote(validation.path) or is_lerobot(Path(validation.path)):
            parts = [part for part, _ in data.set_recipes().values() if part.kind == "lerobot"]
            shown = {"views": parts[0].views, "prompt": parts[0].prompt} if parts else {}
            changes |= {"kind": "lerobot", **shown}
    return data.model_copy(update=changes), [validation.path]


def lerobot_sources(recipe: Recipe) -> list[tuple[DataRecipe, str]]:
    parts = [part for part, _ in recipe.data.set_recipes().values()] or [recipe.data]
    sources = [(part, part.shard_patterns) for part in parts]
    if (held_out := choose_held_out_source(recipe)) is not None:
        sources.append(held_out)
    return [(data, paths[0]) for data, paths in sources if data.kind == "lerobot"]


def build_buckets(recipe: Recipe, model: SizedModel) -> Buckets:
    """Return the training sizes of the recipe.

    Raises RecipeError if the model does not support a size, or if the keys do not allow training on sound.
    """
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
        video_resize=data.video_resize,
        max_upscale=data.max_upscale,
        allow_repeats=data.allow_repeats,
        span=size.num_frames if data.inputs and num_frames < size.num_frames else None,
        sound_rate=None if recipe.is_rl else model.clip_sound_rate,
    )
    if framing.sound_rate is not None:
        if data.fps != size.fps:
            raise RecipeError(
                f"data.fps is {data.fps}, but videos with sound are trained at sampling.fps: set data.fps: {size.fps:g}"
            )
        if data.buckets is not None:
            raise RecipeError("data.buckets: a model of video with sound is trained on one size: remove the key")
    return Buckets(framing, sizes)


def trains_on_data(recipe: Recipe) -> bool:
    algorithm = recipe.rl.algorithm
    return algorithm.num_data_terms(algorithm.terms_per_sample(recipe.sampling)) > 0


def frames_per_clip(recipe: Recipe, model: SizedModel) -> int:
    """Return the number of frames to read per clip.

    RL runs that train only on generated samples read the conditioning frames. Other runs read sampling.num_frames.
    """
    size, (_, most) = recipe.sampling, recipe.algorithm.conditioning_frame_range
    if not recipe.is_rl or most == 0 or trains_on_data(recipe):
        return size.num_frames
    num_latents = model.latent_shape(size.height, size.width, size.num_frames)[1]
    return 1 + (most - 1) * (size.num_frames - 1) // max(1, num_latents - 1)


def assign_buckets(samples: Sequence[Sample], buckets: Buckets, world: World, workers: int) -> list[int]:
    """Return the bucket index of each sample. All ranks must call this."""
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
    """Return the first `count` usable samples, with the conditioning inputs for their centre crops.

    Unusable samples are skipped and logged. Raises DataError if all samples are unusable, or if more than
    data.max_bad_fraction * dataset_size samples are skipped. what: name of the samples in messages.
    """
    usable, broken = list[Sample](), list[str]()  # not the errors: their tracebacks hold the model
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
                broken.append(str(error))
            else:
                usable.append(sample if inputs is None else dataclasses.replace(sample, prompt=prompt))
                display.advance()
    names, allowed = "; ".join(broken[:NUM_SHOWN]), recipe.data.max_bad_fraction
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
    reads_media: bool = True,
) -> BatchReader:
    """Return the reader of training batches. All ranks must call this. The caller must close the reader.

    global_batch: samples per optimizer step over all ranks. unit: number of consecutive samples with equal size.
    cached_latents: function that returns the cached latents of an image or video, or None if they are not cached.
    reads_media: see BatchReader.
    """
    settings: dict[str, Any] = {
        "global_batch": global_batch,
        "seed": recipe.run.seed,
        "max_bad_fraction": recipe.data.max_bad_fraction,
        "workers": recipe.data.workers,
        "inputs": inputs,
        "reads_media": reads_media,
    }
    if recipe.data.streaming:
        return StreamSource(functools.partial(HfStream, recipe.data), framing=buckets.framings[0], **settings)
    return BatchSource(
        data.samples,
        shuffle=recipe.data.shuffle,
        framings=buckets.framings,
        buckets=assign_buckets(data.samples, buckets, world, recipe.data.workers),
        unit=unit,
        rejected={reason: len(data.bad.get(reason, [])) for reason in REASONS},
        cached_latents=cached_latents,
        **settings,
    )


def log_rejected(data: TrainingData) -> None:
    for reason, names in data.bad.items():
        for name in names:
            log.info("skipped %s: %s (%s)", name, REASONS[reason], reason)
