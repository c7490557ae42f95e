"""Base class of rewards. Importing this module loads no model."""

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
DEFAULT_MAX_BATCH = 16  # of recipes and service configurations
FRAMES_PARAMETER = inspect.Parameter("frames", inspect.Parameter.KEYWORD_ONLY, default="first")

__all__ = ["MAX_BATCH", "MediaBatch", "MediaItem", "Range", "Reward", "RewardError", "Score"]


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive limits of an output; -inf or inf for no limit. A value outside the limits is a failure, not a score."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


class Reward(ABC):
    """Base class of rewards. Subclasses are in `wfm_reward/rewards/` or any importable module (`package.module:Class`).

    The module of a reward must be cheap to import. Import and load models in `load()`, which runs in the worker.

    The options of a reward are the keyword parameters of its `__init__`, plus `frames` for rewards that accept only
    images. A parameter named `device` receives the device. An `__init__` that accepts `**options` should pass them on
    with `super().__init__(device, **options)`; the reward then also has the options of its base class.

    An image reward also scores videos: `score` receives the frames selected by the option `frames` as images, and the
    score of the video is the mean over these frames (see `frames.py`).
    """

    name: ClassVar[str]
    """Name of the reward in recipes."""
    media_types: ClassVar[frozenset[str]]
    """Accepted inputs: {"image"}, {"video"} or both. Only rewards with "video" receive whole videos."""
    outputs: ClassVar[Mapping[str, Range]]
    """Limits by output: required for `primary_output`, optional for the `Score.parts`."""
    primary_output: ClassVar[str]
    """Name of the output that is returned as `Score.value`."""
    required_metadata: ClassVar[tuple[str, ...]] = ()
    """Required metadata keys. An item without them becomes a failure before `score` is called."""
    required_inputs: ClassVar[tuple[str, ...]] = ()
    """Required conditioning inputs of an item, such as "actions". Metadata of the same name does not count."""
    stall_s: ClassVar[float] = 120.0
    """Maximum seconds per batch. A worker that takes longer is considered hung and is replaced. A service configuration
    can set another value. If the trainer starts the service, `reward.timeout_s` is the upper limit."""
    max_batch: ClassVar[int] = MAX_BATCH
    """Maximum number of items per batch. Service configurations and recipes can only lower it. Their default is 16, or
    this value if it is smaller."""
    backbone: ClassVar[str] = ""
    """Family of the underlying network, such as "CLIP". Rewards with the same backbone make correlated errors, so one
    cannot serve as an independent check of the other."""
    label_option: ClassVar[str | None] = None
    """Option that is set to LABEL if the reward is named `NAME/LABEL` in a recipe."""

    device: str = "cpu"
    """Device of the model."""
    frames: FrameRule = FrameRule()
    """Frames of a video to score. Only for rewards that do not accept videos."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        """Set `device`, and `frames` from the option `frames`. Raises RewardError for unknown options."""
        self.device = device
        if "frames" in options and "video" not in self.media_types:
            self.frames = self.parse_frame_rule(options.pop("frames"))
        if options:
            raise self.unknown_options_error(options)

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """Return the parameters of `__init__` that are options, by name.

        If a subclass and its base class have an option of the same name, the parameter of the subclass is returned.
        """
        known: dict[str, inspect.Parameter] = {}
        for parent in cls.__mro__:
            if "__init__" in vars(parent) and issubclass(parent, Reward):
                parameters = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
                for p in parameters:
                    if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "device":
                        known.setdefault(p.name, p)
                if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                    break  # no **options: the base classes receive none
        if "video" not in cls.media_types:
            known.setdefault("frames", FRAMES_PARAMETER)
        return known

    @classmethod
    def unknown_options_error(cls, options: Iterable[str]) -> RewardError:
        """Return the error for unknown options."""
        known = sorted(cls.option_parameters())
        return RewardError(
            f"reward {cls.name} has no option {', '.join(sorted(map(str, options)))}; "
            + (f"its options are {', '.join(known)}" if known else "it has no options")
        )

    @classmethod
    def parse_frame_rule(cls, text: Any) -> FrameRule:
        """Parse the value of the option `frames`. Raises RewardError if it is invalid."""
        try:
            return FrameRule(text)
        except RewardError as error:
            raise RewardError(f"reward {cls.name}: {error}") from error

    def load(self) -> None:  # noqa: B027  (rewards without a model need not override it)
        """Import and load models. Called once before the first `score`. Raise RewardError if something is missing."""

    @abstractmethod
    def score(self, batch: MediaBatch) -> list[Score]:
        """Return one Score per item in the same order: `item.score(value, **parts)` or `item.fail(reason)`.

        An exception, a wrong number of scores, NaN or a value outside its range turns the affected items into failures
        with a reason.
        """
