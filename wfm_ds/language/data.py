"""The conversations of a recipe: read, measured, divided into those to train on and those held out."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError
from wfm_ds.language.annotations import (
    REASONS,
    BadConversation,
    Conversation,
    annotation_files,
    content_of,
    parsed,
    rows_in,
)
from wfm_ds.language.lengths import UNKNOWN, Size, SizeCache
from wfm_ds.language.rows import SampleReader
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import uniform

log = logging.getLogger(__name__)

NUM_NAMED = 3  # of the rows that a message names


@dataclass(frozen=True, slots=True)
class Read:
    """The rows of some annotation files: those that are conversations, and what the others are refused for."""

    conversations: list[Conversation]
    bad: list[BadConversation]
    digest: str  # of the files' contents


@dataclass(frozen=True)
class Measured:
    """Conversations that fit a row, with their sizes."""

    conversations: list[Conversation]
    sizes: list[Size]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [size.tokens for size in self.sizes]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of media that they have."""
        return frozenset(medium.kind for conversation in self.conversations for medium in conversation.media)


@dataclass(frozen=True, slots=True)
class LanguageData:
    """Conversations that a run trains on and holds out, and the number of rows that it cannot use."""

    training: Measured
    held_out: Measured
    bad: Mapping[str, int]  # by reason

    @property
    def kinds(self) -> frozenset[str]:
        return self.training.kinds | self.held_out.kinds


def read_annotations(recipe: Recipe, paths: Sequence[str]) -> Read:
    """Parse all rows of these annotations. Raises DataError for a file that cannot be read, or without any row."""
    root, system_prompt = recipe.data.media_path, recipe.data.system_prompt
    conversations, bad, digest = list[Conversation](), list[BadConversation](), hashlib.blake2b(digest_size=16)
    for file in annotation_files(paths):
        content = content_of(file)
        digest.update(f"{file}\0{len(content)}\0".encode())
        digest.update(content)
        for name, row in rows_in(file, content):
            LIVENESS.advance()
            try:
                conversations.append(parsed(row, name, root=root, system_prompt=system_prompt))
            except BadConversation as error:
                bad.append(error)
    if not conversations and not bad:
        raise DataError(f"{', '.join(paths)}: there is no row in it")
    return Read(conversations, bad, digest.hexdigest())


def measured(
    read: Read,
    reader: SampleReader,
    world: World,
    workers: int,
    allowed: float,
    where: str,
    cache: SizeCache | None = None,
) -> LanguageData:
    """Find the size of each conversation that `cache` does not know, a share of them on each rank; all in `training`.
    Collective.

    Raises DataError on all ranks if more than the allowed share of rows cannot be used.
    """
    count = len(read.conversations)
    known = [UNKNOWN] * count if cache is None else cache.read(count)

    def size(place: int) -> Sequence[Any]:
        LIVENESS.advance()
        if known[place] != UNKNOWN:
            return known[place]
        try:
            return reader.size(read.conversations[place])
        except BadConversation as error:
            return error.reason, str(error)

    def measure() -> list[Sequence[Any]]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(size, range(world.rank, count, world.size)))

    parts = world.gather(world.checked(measure))
    found = [parts[i % world.size][i // world.size] for i in range(count)]
    good = [i for i, result in enumerate(found) if len(result) == len(UNKNOWN)]
    bad = [(error.reason, str(error)) for error in read.bad]
    bad += [(result[0], result[1]) for result in found if len(result) != len(UNKNOWN)]
    if cache is not None and world.is_main:
        sizes = [Size(*result) if len(result) == len(UNKNOWN) else UNKNOWN for result in found]
        if sizes != known:
            cache.write(sizes)
    _judge(bad, len(good), allowed, where)
    counts = {reason: sum(of == reason for of, _ in bad) for reason in REASONS}
    conversations = [read.conversations[i] for i in good]
    return LanguageData(Measured(conversations, [Size(*found[i]) for i in good]), Measured([], []), counts)


def _judge(bad: Sequence[tuple[str, str]], num_good: int, allowed: float, where: str) -> None:
    total = len(bad) + num_good
    for reason, meaning in REASONS.items():
        names = [detail for of, detail in bad if of == reason]
        if names:
            log.warning("%s: %d of %d rows left out, %s, e.g. %s", where, len(names), total, meaning, names[0])
    if len(bad) > allowed * total or not num_good:
        raise DataError(
            f"{where}: {len(bad)} of {total} rows cannot be used, more than data.max_bad_fraction {allowed:g} allows; "
            f"repair the first: {'; '.join(detail for _, detail in bad[:NUM_NAMED])}"
        )


def load_conversations(recipe: Recipe, reader: SampleReader, world: World) -> LanguageData:
    """The recipe's data; collective. Held out are those of validation.path, else a share of the rest by their ids."""
    data, validation = recipe.data, recipe.validation

    def all_of(paths: Sequence[str]) -> LanguageData:
        read = world.checked(lambda: read_annotations(recipe, paths))
        cache = None
        if data.cache_dir is not None:
            cache = SizeCache(data.cache_dir, reader.key(recipe, read.digest))
        return measured(read, reader, world, data.workers, data.max_bad_fraction, ", ".join(paths), cache)

    whole = all_of(data.shards)
    if validation.path is not None:
        held_out = all_of([validation.path]).training
        return LanguageData(whole.training, first(held_out, validation.num_images), whole.bad)
    training, held_out = divided(whole.training, validation.holdout)
    if not training.conversations:
        raise DataError(f"{data.path}: validation.holdout {validation.holdout} leaves nothing to train on: lower it")
    return LanguageData(training, first(held_out, validation.num_images), whole.bad)


def divided(whole: Measured, share: float) -> tuple[Measured, Measured]:
    """Return what is trained on and what is held out: by a hash of the id, the same in every run. From two
    conversations on neither is empty, unless the share is 0."""
    draws = [uniform(0, "holdout", conversation.id) for conversation in whole.conversations]
    if share == 0 or len(draws) < 2:
        return whole, Measured([], [])
    ordered = sorted(draws)
    limit = min(max(share, ordered[0]), ordered[-2])
    parts: tuple[Measured, Measured] = (Measured([], []), Measured([], []))
    for conversation, size, draw in zip(whole.conversations, whole.sizes, draws, strict=True):
        part = parts[draw <= limit]
        part.conversations.append(conversation)
        part.sizes.append(size)
    return parts


def first(whole: Measured, count: int) -> Measured:
    """The first of these by their ids."""
    order = sorted(range(len(whole.conversations)), key=lambda i: whole.conversations[i].id)[:count]
    return Measured([whole.conversations[i] for i in order], [whole.sizes[i] for i in order])
