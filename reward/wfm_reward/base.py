"""The base class of rewards: a name, the ranges of its values, and `score`. Importing it imports no model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wfm_ds.errors import RewardError
from wfm_ds.types import MediaBatch, MediaItem, Score
from wfm_reward.frames import FrameRule

MAX_BATCH = 64
FRAMES = inspect.Parameter("frames", inspect.Parameter.KEYWORD_ONLY, default="first")

__all__ = ["MAX_BATCH", "MediaBatch", "MediaItem", "Range", "Reward", "RewardError", "Score"]


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

    Its options are the keyword parameters of its `__init__`, and `frames` if it scores images alone. One that is named
    `device` gets the device. A class whose `__init__` takes `**options` hands them on by
    `super().__init__(device, **options)`, and has the options of its base class too.

    A reward of images scores videos too, by frames: `score` gets the frames that its option `frames` names, as images,
    and the video's score is their mean (frames.py).
    """

    name: ClassVar[str]
    """The name in a recipe."""
    media: ClassVar[frozenset[str]]
    """{"image"}, {"video"} or both. Videos come whole only to a reward that says "video"."""
    outputs: ClassVar[Mapping[str, Range]]
    """Limits of every value that it reports: of `primary`, and of those `Score.parts` that have any."""
    primary: ClassVar[str]
    """The output that is `Score.value`."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Keys that every item's metadata must hold. An item without them fails by name before `score` sees it."""
    needs_inputs: ClassVar[tuple[str, ...]] = ()
    """Inputs that every item must have been told: "actions". Metadata of the same name will not do."""
    stall_s: ClassVar[float] = 120.0
    """The longest that a batch may take: then the worker is taken to hang, and replaced. A service or a recipe may say
    less."""
    max_batch: ClassVar[int] = MAX_BATCH
    """The most items that it takes at once. A service or a recipe may ask for fewer, never for more."""
    backbone: ClassVar[str] = ""
    """The network that it looks through, where others look through one of the kind: they err together, so neither
    confirms the other."""
    label_option: ClassVar[str | None] = None
    """The option that LABEL of the name `NAME/LABEL` stands for, if any."""

    device: str = "cpu"
    """The device that its model runs on."""
    frames: FrameRule = FrameRule()
    """The frames that it sees of a video, if it scores images alone."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        """Set `device`, and `frames` from the option of that name. Raises RewardError for other options."""
        self.device = device
        if "frames" in options and "video" not in self.media:
            self.frames = self.frame_rule(options.pop("frames"))
        if options:
            raise self.unknown(options)

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return its options by name, the nearest class first."""
        known: dict[str, inspect.Parameter] = {}
        for parent in cls.__mro__:
            if "__init__" in vars(parent) and issubclass(parent, Reward):
                parameters = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
                for one in parameters:
                    if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name != "device":
                        known.setdefault(one.name, one)
                if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                    break  # nothing is handed on
        if "video" not in cls.media:
            known.setdefault("frames", FRAMES)
        return known

    @classmethod
    def unknown(cls, options: Iterable[str]) -> RewardError:
        """Return the error about options that it does not have."""
        known = sorted(cls.options())
        return RewardError(
            f"reward {cls.name} has no option {', '.join(sorted(map(str, options)))}; "
            + (f"its options are {', '.join(known)}" if known else "it has no options")
        )

    @classmethod
    def frame_rule(cls, text: Any) -> FrameRule:
        """Return the value of its option `frames`. Raises RewardError."""
        try:
            return FrameRule(text)
        except RewardError as error:
            raise RewardError(f"reward {cls.name}: {error}") from error

    def load(self) -> None:  # noqa: B027  (a reward without a model has nothing to load)
        """Import and load models, once, before the first `score`. Raise RewardError if something is missing."""

    @abstractmethod
    def score(self, batch: MediaBatch) -> list[Score]:
        """Return one Score per item, in the same order: `item.scored(value, **parts)` or `item.failed(reason)`.

        An exception, a wrong length, NaN or a value outside its range makes named failures of the items concerned.
        """
