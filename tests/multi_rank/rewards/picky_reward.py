"""A reward that tells the samples of some prompts apart, those of others not, and knows nothing of the rest."""

from typing import ClassVar

from wfm_reward.base import MediaBatch, Range, Reward, Score


class Picky(Reward):
    """Mean brightness, but .5 of what shall be a square, and a failure of a triangle on black."""

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
