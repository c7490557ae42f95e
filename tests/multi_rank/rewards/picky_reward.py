"""A reward that varies for some prompts, is constant for others, and fails for the rest."""

from typing import ClassVar

from wfm_reward.base import MediaBatch, Range, Reward, Score


class Picky(Reward):
    """The reward is the mean brightness. Prompts with a square get 0.5; prompts with a triangle on black fail."""

    name = "picky"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"picky": Range(0.0, 1.0)}
    primary_output = "picky"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item):
        if "square" in item.prompt:
            return item.score(0.5)
        if "triangle on black" in item.prompt:
            return item.fail("it cannot be seen")
        return item.score(float(item.frames.mean()) / 255)
