"""The base class of rewards."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from wfm_ds.errors import RewardError
from wfm_ds.types import MediaBatch, MediaItem, Score
from wfm_reward.frames import FrameRule

MAX_BATCH = 64
DEFAULT_MAX_BATCH = 16  # default in recipes and service configurations
FRAMES_PARAMETER = inspect.Parameter("frames", inspect.Parameter.KEYWORD_ONLY, default="first")

HubFiles = Literal["model", "processor", "pipeline", "file"]
"""Files of a Hub repository that a reward loads. `model`: a model and processor of transformers. `processor`: only its
configuration and processor. `pipeline`: a diffusers pipeline. `file`: the file that the address names."""

__all__ = ["MAX_BATCH", "UNBOUNDED", "ItemReward", "MediaBatch", "MediaItem", "Range", "Reward", "RewardError", "Score"]


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest valid value of a reward's output, both inclusive. -inf and inf mean no limit."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


UNBOUNDED = Range(-math.inf, math.inf)


class Reward(ABC):
    """Base class of rewards.

    Subclasses are in `wfm_reward/rewards/` or in any importable module (`package.module:Class`). Import and load models
    only in `load()`.

    The options of a reward are the keyword parameters of its `__init__`. A parameter named `device` receives the device
    and is not an option. An `__init__` that accepts `**options` should pass them on with `super().__init__(device,
    **options)`. The reward then also has the options of its base class.

    Image rewards can score videos too: the option `frames` selects frames of the video, `score` receives them as
    images, and the video's score is their mean score.
    """

    name: ClassVar[str]
    """Name of the reward in recipes."""
    media_types: ClassVar[frozenset[str]]
    """Accepted samples: {"image"}, {"video"} or both. Without "video", the reward receives single frames of videos."""
    outputs: ClassVar[Mapping[str, Range]]
    """{name of an output: its limits}, for `primary_output` (required) and the names in `Score.parts` (optional)."""
    primary_output: ClassVar[str]
    """Name of the output that is returned as `Score.value`."""
    required_metadata: ClassVar[tuple[str, ...]] = ()
    """Required metadata keys. An item without them fails before `score` is called."""
    required_inputs: ClassVar[tuple[str, ...]] = ()
    """Required conditioning inputs, such as "actions". Metadata with the same name does not count as an input."""
    needs_reference: ClassVar[bool] = False
    """Whether videos are compared with the recording `MediaItem.reference`. An item without a reference fails."""
    needs_sound: ClassVar[bool] = False
    """Whether the reward hears `MediaItem.sound`. An item without sound fails."""
    sees_images: ClassVar[bool] = False
    """Whether the reward looks at `MediaItem.images`: the source of an edit, and the mask if there is one."""
    stall_s: ClassVar[float] = 120.0
    """Maximum seconds per batch. A worker that takes longer is replaced. Service configurations can change this value.
    If the trainer starts the service, `reward.timeout_s` is the upper limit."""
    max_batch: ClassVar[int] = MAX_BATCH
    """Maximum number of items per batch. Service configurations and recipes can only lower it. If they do not set a
    number, it is 16, or this value if that is smaller."""
    backbone: ClassVar[str] = ""
    """Family of the underlying network, such as "CLIP". Two rewards with the same backbone make correlated errors."""
    label_option: ClassVar[str | None] = None
    """Name of the option that gets the value LABEL if a recipe names the reward `NAME/LABEL`."""

    hub_files: ClassVar[Mapping[str, HubFiles]] = {}
    """{option with a Hub address: the files that the reward loads from it}, for `wfm fetch`. An address is
    OWNER/REPOSITORY or OWNER/REPOSITORY:FILE."""
    download_note: ClassVar[str] = ""
    """One sentence for users, about weights that `wfm fetch` cannot download."""

    needs_mask: bool = False
    """Whether an item without the image `mask` fails. Depends on the options."""
    device: str = "cpu"
    """The torch device of the model."""
    deadline_s: float = math.inf
    """Time (time.monotonic()) at which the current batch must be finished. The worker sets it before each batch."""
    frames: FrameRule = FrameRule()
    """Selects the frames of a video to score, if the reward does not accept videos."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        """Store `device` and the option `frames`. Raises RewardError for an invalid `frames` or unknown options."""
        self.device = device
        if "frames" in options and "video" not in self.media_types:
            self.frames = self.parse_frame_rule(options.pop("frames"))
        if options:
            raise self.unknown_options_error(options)

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """Return {option name: parameter of `__init__`}, including the options of base classes."""
        known: dict[str, inspect.Parameter] = {}
        for parent in cls.__mro__:
            if "__init__" in vars(parent) and issubclass(parent, Reward):
                parameters = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
                for p in parameters:
                    if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "device":
                        known.setdefault(p.name, p)
                if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                    break  # no **options: base classes receive none
        if "video" not in cls.media_types:
            known.setdefault("frames", FRAMES_PARAMETER)
        return known

    @classmethod
    def unknown_options_error(cls, options: Iterable[str]) -> RewardError:
        known = sorted(cls.option_parameters())
        return RewardError(
            f"reward {cls.name} has no option {', '.join(sorted(map(str, options)))}; "
            + (f"its options are {', '.join(known)}" if known else "it has no options")
        )

    @classmethod
    def parse_frame_rule(cls, text: Any) -> FrameRule:
        try:
            return FrameRule(text)
        except RewardError as error:
            raise RewardError(f"reward {cls.name}: {error}") from error

    def load(self) -> None:  # noqa: B027  (rewards without a model need not override it)
        """Import and load models. Called once before `score`. Raises RewardError if a package or file is missing."""

    def check_reachable(self) -> None:  # noqa: B027
        """Raise RewardError if a service that this reward calls does not reply. This can be called before `load`."""

    @abstractmethod
    def score(self, batch: MediaBatch) -> list[Score]:
        """Return one Score per item, in the order of the items: `item.score(value, **parts)` or `item.fail(reason)`.

        If this method raises an exception or returns a wrong number of scores, the worker calls it for each item
        separately. An item without a valid score fails. A score is invalid if it is NaN or outside its limits.
        """


class ItemReward(Reward):
    """Base class of rewards that score each item by itself."""

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self.score_item(item) for item in batch]

    @abstractmethod
    def score_item(self, item: MediaItem) -> Score:
        """Return `item.score(value, **parts)` or `item.fail(reason)`."""
