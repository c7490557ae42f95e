"""The conversations of a recipe: read, measured, divided into those to train on and those held out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError
from wfm_ds.language.annotations import REASONS, BadConversation, Conversation, annotation_files, parsed, rows_of
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


@dataclass(frozen=True, slots=True)
class Measured:
    """Conversations that fit a row, with their lengths in tokens."""

    conversations: list[Conversation]
    lengths: list[int]

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
    found = Read([], [])
    for file in annotation_files(paths):
        for name, row in rows_of(file):
            LIVENESS.advance()
            try:
                root, system_prompt = recipe.data.media_path, recipe.data.system_prompt
                found.conversations.append(parsed(row, name, root=root, system_prompt=system_prompt))
            except BadConversation as error:
                found.bad.append(error)
    if not found.conversations and not found.bad:
        raise DataError(f"{', '.join(paths)}: there is no row in it")
    return found


def measured(read: Read, reader: SampleReader, world: World, workers: int, allowed: float, where: str) -> LanguageData:
    """Find the length of each conversation, a share of them on each rank; all in `training`. Collective.

    Raises DataError on all ranks if more than the allowed share of rows cannot be used.
    """

    def length(conversation: Conversation) -> int | tuple[str, str]:
        LIVENESS.advance()
        try:
            return len(reader.tokens(conversation)[0])
        except BadConversation as error:
            return error.reason, str(error)

    def measure() -> list[int | tuple[str, str]]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(length, read.conversations[world.rank :: world.size]))

    parts = world.gather(world.checked(measure))
    found = [parts[i % world.size][i // world.size] for i in range(len(read.conversations))]
    good = [i for i, result in enumerate(found) if isinstance(result, int)]
    bad = [(error.reason, str(error)) for error in read.bad]
    bad += [tuple(result) for result in found if not isinstance(result, int)]
    _judge(bad, len(good), allowed, where)
    counts = {reason: sum(of == reason for of, _ in bad) for reason in REASONS}
    conversations = [read.conversations[i] for i in good]
    return LanguageData(Measured(conversations, [found[i] for i in good]), Measured([], []), counts)


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
        return measured(read, reader, world, data.workers, data.max_bad_fraction, ", ".join(paths))

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
    for conversation, length, draw in zip(whole.conversations, whole.lengths, draws, strict=True):
        part = parts[draw <= limit]
        part.conversations.append(conversation)
        part.lengths.append(length)
    return parts


def first(whole: Measured, count: int) -> Measured:
    """The first of these by their ids."""
    order = sorted(range(len(whole.conversations)), key=lambda i: whole.conversations[i].id)[:count]
    return Measured([whole.conversations[i] for i in order], [whole.lengths[i] for i in order])
