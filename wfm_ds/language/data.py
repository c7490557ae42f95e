"""The conversations of a recipe: read them, count their tokens, and split off held-out conversations."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wfm_ds.data.samples import choose_held_out
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.progress import show_wait, track_progress
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError
from wfm_ds.language.annotations import (
    REASONS,
    BadConversation,
    Conversation,
    annotation_files,
    parse_conversation,
    parse_rows,
    read_content,
)
from wfm_ds.language.packed_sequences import UNKNOWN_SIZE, ConversationReader, ConversationSize, SizeCache
from wfm_ds.recipe.schema import Recipe

log = logging.getLogger(__name__)

NUM_SHOWN = 3  # bad rows shown in a message


@dataclass(frozen=True)
class SizedConversations:
    """Conversations that fit into a packed sequence, with their token counts."""

    conversations: list[Conversation]
    sizes: list[ConversationSize]

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [size.tokens for size in self.sizes]


@dataclass(frozen=True, slots=True)
class LanguageData:
    """The training and held-out conversations of a run, and the number of bad rows."""

    training: SizedConversations
    held_out: SizedConversations
    bad: Mapping[str, int]  # {reason: number of bad rows}

    @property
    def media_kinds(self) -> frozenset[str]:
        conversations = [*self.training.conversations, *self.held_out.conversations]
        return frozenset(item.kind for conversation in conversations for item in conversation.media)


def read_annotations(recipe: Recipe, paths: Sequence[str]) -> tuple[list[Conversation], list[BadConversation], str]:
    """Return the valid conversations of annotation files, the errors of all invalid rows, and a hash of the files.

    Raises DataError if a file cannot be read or if there are no rows.
    """
    root, system_prompt = recipe.data.media_path, recipe.data.system_prompt
    conversations, bad, digest = list[Conversation](), list[BadConversation](), hashlib.blake2b(digest_size=16)
    files = annotation_files(paths)
    folder = common_folder(files)
    with track_progress(files, "reading annotations", total=len(files)) as tracked_files:
        for file in tracked_files:
            with show_wait(f"reading {file}"):
                content = read_content(file)
                rows, num_rows = parse_rows(file, content)
            digest.update(f"{file}\0{len(content)}\0".encode())
            digest.update(content)
            with track_progress(rows, f"reading {file}", total=num_rows) as tracked_rows:
                for place, row in tracked_rows:
                    name = place.removeprefix(folder)  # ids select held-out conversations: independent of the folder
                    try:
                        conversations.append(parse_conversation(row, name, root=root, system_prompt=system_prompt))
                    except BadConversation as error:
                        bad.append(error)
    if not conversations and not bad:
        raise DataError(f"{', '.join(paths)}: no rows")
    return conversations, bad, digest.hexdigest()


def common_folder(files: Sequence[str]) -> str:
    """Return the deepest folder that contains all these paths or s3:// addresses, with a slash at its end.

    Returns "" if there is none.
    """
    levels = zip(*(file.split("/")[:-1] for file in files), strict=False)
    return "".join(f"{names[0]}/" for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))


def load_paths(recipe: Recipe, reader: ConversationReader, world: World, paths: Sequence[str]) -> LanguageData:
    """Read annotation files, count the tokens that are not cached, and return all valid conversations as training data.

    All ranks must call this. Raises DataError on all ranks if too many rows are bad.
    """
    conversations, errors, digest = world.run_checked(lambda: read_annotations(recipe, paths))
    count, data = len(conversations), recipe.data
    cache = None if data.cache_dir is None else SizeCache(data.cache_dir, reader.cache_key(recipe, digest))
    cached_sizes = [UNKNOWN_SIZE] * count if cache is None else cache.read(count)

    def measure_one(index: int) -> Sequence[Any]:
        LIVENESS.record_progress()
        if cached_sizes[index] != UNKNOWN_SIZE:
            return cached_sizes[index]
        try:
            return reader.measure(conversations[index])
        except BadConversation as error:
            return error.reason, str(error)

    def measure_shard() -> list[Sequence[Any]]:
        shard = range(world.rank, count, world.size)
        with (
            ThreadPoolExecutor(data.workers) as pool,
            track_progress(pool.map(measure_one, shard), "counting tokens", total=len(shard)) as sizes,
        ):
            return list(sizes)

    parts = world.gather(world.run_checked(measure_shard))
    results = [parts[i % world.size][i // world.size] for i in range(count)]
    sizes = [ConversationSize(*result) if len(result) == len(UNKNOWN_SIZE) else UNKNOWN_SIZE for result in results]
    bad = [(error.reason, str(error)) for error in errors]
    bad += [(result[0], result[1]) for result in results if len(result) != len(UNKNOWN_SIZE)]
    if cache is not None and world.is_main and sizes != cached_sizes:
        cache.write(sizes)
    good = [i for i, size in enumerate(sizes) if size != UNKNOWN_SIZE]
    _check_bad_rows(bad, len(good), data.max_bad_fraction, ", ".join(paths))
    counts = {reason: sum(row_reason == reason for row_reason, _ in bad) for reason in REASONS}
    training = SizedConversations([conversations[i] for i in good], [sizes[i] for i in good])
    return LanguageData(training, SizedConversations([], []), counts)


def _check_bad_rows(bad: Sequence[tuple[str, str]], num_good: int, max_bad_fraction: float, source: str) -> None:
    total = len(bad) + num_good
    for reason, meaning in REASONS.items():
        names = [detail for row_reason, detail in bad if row_reason == reason]
        if names:
            log.warning("%s: skipped %d of %d rows, %s, e.g. %s", source, len(names), total, meaning, names[0])
    if len(bad) > max_bad_fraction * total or not num_good:
        raise DataError(
            f"{source}: {len(bad)} of {total} rows are invalid (data.max_bad_fraction: {max_bad_fraction:g}). First: "
            f"{'; '.join(detail for _, detail in bad[:NUM_SHOWN])}"
        )


def load_conversations(recipe: Recipe, reader: ConversationReader, world: World) -> LanguageData:
    """Load the recipe's conversations. All ranks must call this.

    Held-out conversations come from validation.path. If it is not set, they are split off the training data.
    """
    validation = recipe.validation
    dataset = load_paths(recipe, reader, world, recipe.data.shard_patterns)
    if validation.path is not None:
        training, held_out = dataset.training, load_paths(recipe, reader, world, [validation.path]).training
    else:
        training, held_out = split_holdout(dataset.training, validation.holdout)
        if not training.conversations:
            raise DataError(
                f"{recipe.data.path}: validation.holdout {validation.holdout} leaves no training data: lower it"
            )
    return LanguageData(training, first_by_id(held_out, validation.num_images), dataset.bad)


def split_holdout(dataset: SizedConversations, share: float) -> tuple[SizedConversations, SizedConversations]:
    """Split conversations by `choose_held_out`. Returns (training, held-out). share: fraction to hold out."""
    is_held_out = choose_held_out([conversation.id for conversation in dataset.conversations], share)
    parts: tuple[SizedConversations, SizedConversations] = (SizedConversations([], []), SizedConversations([], []))
    for conversation, size, held_out in zip(dataset.conversations, dataset.sizes, is_held_out, strict=True):
        parts[held_out].conversations.append(conversation)
        parts[held_out].sizes.append(size)
    return parts


def first_by_id(dataset: SizedConversations, count: int) -> SizedConversations:
    order = sorted(range(len(dataset.conversations)), key=lambda i: dataset.conversations[i].id)[:count]
    return SizedConversations([dataset.conversations[i] for i in order], [dataset.sizes[i] for i in order])
