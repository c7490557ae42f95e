"""What a reward is: a class with a name, the ranges of its values, and `score`. Importing it imports no model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wfm_ds.errors import RewardError
from wfm_ds.types import MediaBatch, MediaItem, Score
from wfm_reward.frames import FrameRule

__all__ = ["MediaBatch", "MediaItem", "Range", "Reward", "RewardError", "Score"]


@dataclass(frozen=True, slots=True)
class Range:
    """Hard limits of an output, both included. A value outside is a failure, not a score; +-inf where there is none."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


class Reward(ABC):
    """One file in `wfm_reward/rewards/`, or any `package.module:Class`.

    The module that defines a reward must import nothing heavy: models come in `load()`, in the scorer process.
    An option is a keyword parameter of the subclass's `__init__`, which hands the others on:
    `def __init__(self, device="cpu", *, threads=1, **options): super().__init__(device, **options)`;
    what nobody takes is refused by name.

    A reward of images scores videos too, by frames: `score` gets the frames that its option `frames` names, as images,
    and the video's score is their mean (frames.py).
    """

    name: ClassVar[str]
    """As written in a recipe."""
    media: ClassVar[frozenset[str]]
    """{"image"}, {"video"} or both. Videos come whole only to a reward that says "video"."""
    outputs: ClassVar[Mapping[str, Range]]
    """Limits of every value that it reports: of `primary`, and of those `Score.parts` that have any."""
    primary: ClassVar[str]
    """The output that is `Score.value`."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Keys that every item's metadata must hold. An item without them fails by name before `score` sees it."""
    stall_s: ClassVar[float] = 120.0
    """The longest that a batch may take: then the worker is taken to hang, and replaced. A service or a recipe may say
    less."""
    label_option: ClassVar[str | None] = None
    """The option that LABEL of the name `NAME/LABEL` stands for, if any."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        """`frames`, of a reward of images alone: first (default), middle, last or uniform:N. Raises RewardError for
        other values and for options that no class on the way here takes."""
        name = getattr(self, "name", type(self).__name__)
        frames = FrameRule()
        if "frames" in options and "video" not in self.media:
            try:
                frames = FrameRule(options.pop("frames"))
            except RewardError as error:
                raise RewardError(f"reward {name}: {error}") from error
        if options:
            known = sorted(_options(type(self)))
            raise RewardError(
                f"reward {name} has no option {', '.join(sorted(options))}; "
                + (f"its options are {', '.join(known)}" if known else "it has no options")
            )
        self.device = device
        self.frames = frames  # what is seen of a video

    def load(self) -> None:  # noqa: B027  (a reward without a model has nothing to load)
        """Import and load models, once, before the first `score`. Raise RewardError if something is missing."""

    @abstractmethod
    def score(self, batch: MediaBatch) -> list[Score]:
        """One Score per item, same order: `item.scored(value, **parts)` or `item.failed(reason)`.

        An exception, a wrong length, NaN or a value outside its range makes named failures of the items concerned.
        """


def _options(reward: type[Reward]) -> set[str]:
    known = set() if "video" in reward.media else {"frames"}
    for cls in reward.__mro__:
        if "__init__" in vars(cls) and issubclass(cls, Reward):
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            known |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return known - {"device"}
