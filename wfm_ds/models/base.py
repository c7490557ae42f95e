"""The interface of every pipeline family to the loops. Nothing outside `models/` may branch on a family.

Latents, sigma and velocities are float32; time is `sigma` in (0, 1] (1 is pure noise); velocity is `eps - x0`.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import diffusers.utils.logging
import numpy as np
import numpy.typing as npt
import torch
import transformers.utils.logging
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models import vae
from wfm_ds.models.conditional_frames import KEYS
from wfm_ds.models.fingerprint import fingerprint
from wfm_ds.pinned import on_device
from wfm_ds.recipe.stated import FPS
from wfm_ds.sampling.schedule import shifted

if TYPE_CHECKING:
    from wfm_ds.models.guardrail import Guardrail
    from wfm_ds.models.inputs import Input
    from wfm_ds.models.lora_names import LoraName
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.types import Conditioning


MAX_MULTIPLE = 1024  # of height and width in pixels


@dataclass(frozen=True, slots=True)
class NegativeText:
    """A text that guidance contrasts with, or the "" that replaces a dropped caption: see encode_negative."""

    text: str


class DiffusionModel(ABC):
    """A loaded pipeline, taken apart: text in, latents and pixels both ways, one call of the denoiser.

    A family is a subclass in a file of its own in this folder; `registry.families` finds it.
    """

    family: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]  # matched against model_index.json:_class_name
    conditioning_keys: ClassVar[frozenset[str]]  # what encode_text returns and denoise expects, exactly
    default_lora_targets: tuple[str, ...]  # suffixes of linear layers; {} is the number of a block
    lora_names: ClassVar[tuple[LoraName, ...]] = ()  # what other tools call the layers (models/lora_names.py)
    comfyui_prefix: ClassVar[Literal["transformer", "diffusion_model"]] = "diffusion_model"  # with it: original names
    required_parts: ClassVar[tuple[str, ...]]  # names in model_index.json that must not be null
    block_classes: ClassVar[tuple[type[nn.Module], ...]]  # for checkpointing, ZeRO-3 leaves, compile
    video: ClassVar[bool] = False  # pixels [B,3,F,H,W] and latents [B,C,T,h,w], also for a single frame
    prompt_templates: ClassVar[tuple[str, ...]] = ()  # the recipe's choices, if the stock pipeline wraps prompts
    default_side: ClassVar[int | None] = None  # pixels of a stock picture, if the network's config has no sample_size
    has_guardrail: ClassVar[bool] = False  # the pipeline has a safety checker (models/guardrail.py)
    takes: ClassVar[Mapping[str, Input]] = {}  # what data.inputs may name: actions, c2w, ...
    # A family's default, which a loaded pipeline may narrow down or widen:
    denoiser_parts: tuple[str, ...] = ("transformer",)  # names in model_index.json; Wan 2.2 has two experts
    conditional_frames: tuple[int, ...] = (0,)  # how many first latent frames may be given (conditional_frames.py)
    optional_keys: frozenset[str] = frozenset()  # conditioning that encode_inputs may add
    pins_frames: bool = True  # these are clean latents in the place of noise; False: an input FIRST_FRAME, all is noise

    def __init__(
        self,
        pipeline: Any,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_sequence_length: int | None = None,
        prompt_template: str | None = None,
        leave_denoiser: bool = False,
        fps: float = FPS,
        inputs: Collection[str] = (),
        embedded_guidance: float | None = None,
    ) -> None:
        """Take over `pipeline`: freeze all but the denoiser, and move everything to `device`.

        `prompt_template` is one of prompt_templates, or None for what is stored with the pipeline. `leave_denoiser`:
        but the denoiser, which an engine will place. `fps`: frames a second of all videos, for networks that are told.
        `inputs`: names of what every sample is told besides text and frames, of `takes`. `embedded_guidance`: the
        guidance scale that the network takes as an input, for families of which some do.
        """
        if not hasattr(pipeline.scheduler, "sigmas"):
            name = type(pipeline.scheduler).__name__
            raise ModelError(f"{path}: {name} is no flow-matching scheduler; use the one that the pipeline came with")
        self.pipeline = pipeline
        self.path = path
        self.dtype = dtype  # compute dtype of the denoiser
        self.leave_denoiser = leave_denoiser
        self.bare_denoiser = self.take_denoiser(pipeline)
        self.denoiser = self.bare_denoiser  # the engine puts its wrapper here
        self.config = pipeline.transformer.config  # stays when the denoiser is wrapped
        self.max_sequence_length = max_sequence_length or stock_argument(pipeline, "max_sequence_length")
        self.prompt_template = prompt_template
        self.fps = fps
        self.inputs = frozenset(inputs)
        self.embedded_guidance = embedded_guidance  # None: it takes none
        for part in self.frozen_parts():
            part.requires_grad_(False).eval()
        self.to(device)

    @classmethod
    def extra_parts(cls, folder: Path, setting: Guardrail) -> dict[str, Any]:
        """Parts of the pipeline that its folder does not hold; ModelError if one is missing."""
        return {}

    @classmethod
    def late_parts(cls, folder: Path) -> dict[str, Any]:
        """Parts to give the pipeline when it is made, in place of those that its index names and that diffusers would
        check to be of another class."""
        return {}

    @classmethod
    def takes_guidance(cls, folder: Path) -> bool:
        """Tell whether the network in this pipeline folder takes a guidance scale as an input."""
        return False

    @classmethod  # noqa: B027, most families load whatever their classes name
    def check_folder(cls, folder: Path) -> None:
        """ModelError for a pipeline of the family's classes that cannot be loaded, before that is tried."""

    @classmethod
    def placeholders(cls) -> dict[str, Any]:
        """Stand-ins for parts that the pipeline's constructor looks into, where networks have shapes alone (empty.py)
        and the parts are not loaded."""
        return {}

    @classmethod
    def needs_first_frame(cls, folder: Path) -> bool:
        """Tell whether the pipeline of this folder makes videos of an image alone."""
        return False

    @classmethod
    def stock_guidance(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        """The w of a stock picture, by the pipeline's model_index.json and the arguments of its call."""
        return float(call.get("guidance_scale", 1.0))

    def take_denoiser(self, pipeline: Any) -> nn.Module:
        """The one module that the engine trains; it holds all of `denoiser_parts`."""
        denoiser: nn.Module = pipeline.transformer
        return denoiser

    def frozen_parts(self) -> list[nn.Module]:
        """VAE, text encoders and whatever else the pipeline owns, without the denoiser."""
        parts = self.pipeline.components.items()
        return [part for name, part in parts if isinstance(part, nn.Module) and name not in self.denoiser_parts]

    def to(self, device: torch.device | str) -> None:
        """Move VAE and text encoders; the denoiser too, unless an engine has wrapped and placed it."""
        self.device = torch.device(device)
        parts = self.frozen_parts()
        if self.denoiser is self.bare_denoiser and not self.leave_denoiser:
            parts.append(self.denoiser)
        for part in parts:
            part.to(self.device)

    def freeze_all_but(self, targets: Sequence[str]) -> None:  # noqa: B027, most families have nothing to do
        """Prepare for adapters on the layers with these suffixes; all other layers of the denoiser stay as they are.

        A family may then compute once for each prompt, in encode_text, what depends on frozen layers alone.
        """

    def check_sampling(self, sampling: SamplingRecipe) -> None:  # noqa: B027, most families draw whatever is asked for
        """ModelError for settings that the stock pipeline has no way to draw with."""

    def check_prompts(self, prompts: Sequence[str]) -> None:  # noqa: B027, most families have no guardrail
        """ModelError if the pipeline's guardrail refuses a prompt that is to be generated from."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of names in the denoiser's files that full training leaves as they are, and exports take from the
        base: what no loss can reach. Adapters on such layers do nothing."""
        return ()

    def part_of(self, name: str) -> str:
        """Return the network that a parameter of the denoiser belongs to, of those of which a step may run some."""
        return name.partition(".")[0] if len(self.denoiser_parts) > 1 else ""

    def frozen_names(self) -> frozenset[str]:
        """The denoiser's parameters that full training leaves as they are."""
        return frozenset(name for name, _ in self.bare_denoiser.named_parameters() if matches(name, self.frozen))

    def caption(self, text: str, height: int, width: int, num_frames: int, *, negative: bool = False) -> str:
        """Return the text to encode for pixels of this size: some pipelines state it in the prompt. negative: it is
        that of a NegativeText."""
        return text

    @abstractmethod
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embeddings of B >= 1 prompts by name, [B, ...] each, in the encoders' dtype, masks int64. No gradient.

        Never doubled for guidance: the unconditional pass encodes its own text.
        """

    def encode_negative(self, texts: Sequence[str]) -> Conditioning:
        """Encode, as encode_text does, what guidance contrasts with and what replaces a dropped caption
        (`NegativeText`).

        It differs where the stock pipeline wraps its prompts in an instruction and its negative prompts not.
        """
        return self.encode_text(texts)

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Conditioning [B, ...] under `optional_keys` of what B samples are told besides text and frames.

        inputs: of each sample, names of `takes` alone; num_frames and size (height, width) are those of the pixels.
        ValueError for arrays that the family cannot use: their width is a checkpoint's own.
        """
        return {}

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes of one sample's conditioning by name, without the batch, that every sample has besides its text, for
        latents of this shape: to count with, before there are any."""
        return {}

    @property
    def may_pin(self) -> bool:
        """Tell whether samples may begin with clean latents."""
        return self.pins_frames and max(self.conditional_frames) > 0

    def pinned(self, num_frames: tuple[int, int]) -> tuple[int, int]:
        """The least and most first latent frames that are no noise, of samples that are given so many (the recipe's
        algorithm.num_conditional_frames)."""
        return num_frames if self.pins_frames else (0, 0)

    @property
    def text_dtype(self) -> torch.dtype:
        """The dtype of a text's conditioning, masks aside: that of the encoders; float32 without any."""
        encoders = self.text_parts().values()
        return next((parameter.dtype for encoder in encoders for parameter in encoder.parameters()), torch.float32)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one text's conditioning by name, without the batch. Families know theirs without encoding."""
        return {name: tuple(tensor.shape[1:]) for name, tensor in self.encode_text([""]).items()}

    def from_embedding(self, embedding: Tensor) -> Conditioning | None:
        """Conditioning [1, ...] of a text from its embedding [n, D] computed elsewhere; None if that is not one of this
        model's text encoder. Families with several encoders take none."""
        return None

    def text_identity(self) -> dict[str, Any]:
        """Everything besides the text that the results of encode_text and encode_negative depend on, as JSON."""
        dtypes = {str(next(encoder.parameters()).dtype) for encoder in self.text_parts().values()}
        return {
            "family": self.family,
            "parts": fingerprint(self.path, self.text_folders()),
            "dtype": sorted(dtypes),
            **self.text_call(),
        }

    def latent_identity(self) -> dict[str, Any]:
        """Everything besides the pixels that the result of encode_pixels depends on, as JSON."""
        dtype = str(next(self.pipeline.vae.parameters()).dtype)
        return {"family": self.family, "parts": fingerprint(self.path, ["vae"]), "dtype": dtype}

    def parts_named(self, prefix: str) -> dict[str, Any]:
        """The parts of the pipeline whose names begin so, but those that it does without."""
        parts = self.pipeline.components.items()
        return {name: part for name, part in parts if name.startswith(prefix) and part is not None}

    def text_parts(self) -> dict[str, nn.Module]:
        """The networks that encode text, by name; none where they were dropped."""
        return self.parts_named("text_encoder")

    def text_folders(self) -> list[str]:
        """Subfolders of the pipeline with all that a text's embedding depends on."""
        return [*self.text_parts(), *self.parts_named("tokenizer")]

    def drop_text_encoders(self) -> None:
        """Free their memory, when every text that will be asked for is cached. Nothing can be encoded afterwards."""
        for name in self.text_parts():
            setattr(self.pipeline, name, None)

    def move_text_encoders(self, device: torch.device | str) -> None:
        """Bring the text encoders there, and nothing else: to the host while no text is to be encoded, and back."""
        for encoder in self.text_parts().values():
            encoder.to(device)

    def null_text(self, negative_text: str | None = None) -> str:
        """The text that guidance contrasts with: the negative text, else the stock pipeline's own."""
        return "" if negative_text is None else negative_text

    @staticmethod
    def repeat(conditioning: Conditioning, k: int) -> Conditioning:
        """Repeat every row k times in succession: equal to encoding each prompt k times."""
        return {name: tensor.repeat_interleave(k, dim=0) for name, tensor in conditioning.items()}

    @staticmethod
    def stack(rows: Sequence[Conditioning]) -> Conditioning:
        """Join rows of texts, encoded one by one, in their order. ValueError for unlike shapes: a family whose texts
        have lengths of their own pads them to the longest."""
        for name in rows[0]:
            shapes = {tuple(row[name].shape[1:]) for row in rows}
            if len(shapes) > 1:
                raise ValueError(f"{name} has {' and '.join(str(list(shape)) for shape in sorted(shapes))}")
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Normalised latents of pixels in [0, 1], all float32; ValueError for others.

        Images [B,3,H,W] give [B,C,h,w]; a video family takes [B,3,F,H,W] and gives [B,C,T,h,w].
        """
        layout, ndim = ("[B,3,F,H,W]", 5) if self.video else ("[B,3,H,W]", 4)
        if pixels.ndim != ndim or pixels.shape[1] != 3 or pixels.dtype != torch.float32:
            raise ValueError(f"pixels must be float32 {layout}, got {pixels.dtype} {list(pixels.shape)}")
        height, width = pixels.shape[-2:]
        self.latent_shape(height, width, pixels.shape[2] if self.video else 1)
        shifted = 2 * pixels.to(self.device) - 1
        return torch.cat([self.to_latents(part) for part in torch.split(shifted, self.encode_batch(pixels))])

    def encode_batch(self, pixels: Tensor) -> int:
        """Number of these media to encode at once. One video: latents that are kept must not depend on what was encoded
        beside them. On a CPU all pictures: its memory is no device's."""
        if self.video:
            return 1
        height, width = pixels.shape[-2:]
        return len(pixels) if self.device.type == "cpu" else vae.media_at_once(self.pipeline.vae, height * width)

    def encode_media(self, media: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
        """encode_pixels of images [H,W,3] or videos [F,H,W,3], all of one shape; an image is a video of one frame."""
        videos = [torch.from_numpy(m if m.ndim == 4 else m[None]) for m in media]
        frames = on_device(torch.stack(videos), self.device)
        pixels = frames.permute(0, 4, 1, 2, 3).float() / 255
        return self.encode_pixels(pixels if self.video else pixels.squeeze(2))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels in [0, 1] of normalised latents, all float32, in the layouts of encode_pixels."""
        return (self.to_pixels(latents.to(self.device)) / 2 + 0.5).clamp(0, 1)

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Normalised latents of pixels in [-1, 1], both float32, on the device."""
        return vae.encode(self.pipeline.vae, pixels)

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Pixels, roughly in [-1, 1], of normalised latents, both float32, on the device."""
        return vae.decode(self.pipeline.vae, latents)

    @staticmethod
    def levels(pixels: Tensor) -> Tensor:
        """round(255 * x), uint8, of pixels in [0, 1]."""
        return (255 * pixels.clamp(0, 1)).round().to(torch.uint8)

    @staticmethod
    def to_uint8(pixels: Tensor) -> npt.NDArray[np.uint8]:
        """[B,H,W,3] (videos [B,F,H,W,3]) on the host: `levels` of pixels [B,3,H,W] ([B,3,F,H,W])."""
        return np.ascontiguousarray(DiffusionModel.levels(pixels).cpu().movedim(1, -1).numpy())

    @abstractmethod
    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        """Velocity eps - x0, float32, in the shape of the latents; keeps the autograd graph.

        latents [B,C,...] float32, sigma [B] float32 in (0, 1], conditioning as from encode_text with B rows. `expert`:
        which one, of families that have several. Guidance is the caller's: this is one pass. ValueError for other
        shapes, dtypes or keys, and, on the CPU only (elsewhere the check would wait for the device), other sigma.
        """

    @property
    def sigma_ranges(self) -> tuple[tuple[float, float], ...]:
        """The noise levels [low, high) of each expert, in their order, the first with 1. One expert has them all."""
        return ((0.0, 1.0),)

    def expert_of(self, sigma: float) -> int:
        """Return the expert of this noise level: the index into sigma_ranges. Loops know sigma on the host."""
        return next(i for i, (low, _) in enumerate(self.sigma_ranges) if sigma >= low)

    def check_denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> None:
        """Raise ValueError unless the arguments of `denoise` are as it documents. Nothing is broadcast."""
        count = latents.shape[0]
        if latents.dtype != torch.float32:
            raise ValueError(f"latents must be float32, got {latents.dtype}")
        if sigma.shape != (count,) or sigma.dtype != torch.float32:
            raise ValueError(f"sigma must be float32 [{count}], got {sigma.dtype} {list(sigma.shape)}")
        if sigma.device.type == "cpu" and not bool(((sigma > 0) & (sigma <= 1)).all()):
            raise ValueError(f"sigma must be above 0 and at most 1, got {sigma.tolist()}")
        optional = self.optional_keys | (KEYS if self.may_pin else frozenset[str]())
        if conditioning.keys() - optional != self.conditioning_keys:
            raise ValueError(f"conditioning must hold {sorted(self.conditioning_keys)}, got {sorted(conditioning)}")
        for name, tensor in conditioning.items():
            if tensor.shape[0] != count:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, the latents have {count}")

    def combine_guidance(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """uncond + w * (cond - uncond) of two velocities; w = 1 is cond."""
        return uncond + scale * (cond - uncond)

    @abstractmethod
    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """(C,h,w) of an image or (C,T,h,w) of a video of this many pixels; ValueError names the multiple it must be."""

    def size_multiple(self, num_frames: int = 1) -> int:
        """The number that height and width are multiples of: the smallest size that there is."""

        def exists(size: int) -> bool:
            try:
                self.latent_shape(size, size, num_frames)
            except ValueError:
                return False
            return True

        return next(size for size in range(1, MAX_MULTIPLE + 1) if exists(size))

    @abstractmethod
    def num_tokens(self, shape: Sequence[int]) -> int:
        """Tokens that the denoiser makes of latents of this shape, text not counted."""

    def sigmas(self, num_steps: int, shape: Sequence[int]) -> Tensor:
        """CPU float64 [num_steps + 1], descending to exactly 0: the grid of the stock pipeline for this latent shape.

        Read from a copy of the pipeline's scheduler, never from a formula: schedulers differ at the ends.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        arguments = self.schedule_arguments(shape, num_steps)
        scheduler.set_timesteps(**({} if "sigmas" in arguments else {"num_inference_steps": num_steps}), **arguments)
        grid: Tensor = scheduler.sigmas.to("cpu", torch.float64)
        falls = bool((grid[1:] < grid[:-1]).all())
        if len(grid) != num_steps + 1 or not falls or grid[0] > 1 or grid[-1] != 0:
            raise ModelError(
                f"{self.path}: {num_steps} steps of {type(scheduler).__name__} do not fall from at most 1 to 0 "
                f"({grid.tolist()}); use a flow-matching scheduler, or fewer steps"
            )
        return grid

    def rollout_sigmas(self, sampling: SamplingRecipe) -> Tensor:
        """The grid of the recipe's rollouts, as `sigmas` returns them. Raises ModelError where there is no such grid,
        ValueError for a size that is none of the family's."""
        num_steps, shape = sampling.steps, self.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        if sampling.grid == "stock":
            return self.sigmas(num_steps, shape)
        shift = self._shift(num_steps, shape)
        if shift is None:
            raise ModelError(f"{self.path}: the scheduler has no fixed shift: set sampling.grid: stock in the recipe")
        q = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps
        return shifted(q, shift)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        """Return what the stock pipeline passes to set_timesteps for latents of this shape, besides the number of
        steps; `sigmas`, a grid before the shift, in its place."""
        return {}

    @property
    def stock_solver(self) -> str:
        """Our solver of the order of the pipeline's own scheduler: `dpm2` for multistep ones, else `ode`."""
        return "dpm2" if self.pipeline.scheduler.config.get("solver_order", 1) > 1 else "ode"

    def flow_shift(self, sampling: SamplingRecipe) -> float:
        """The shift s in sigma = s * q / (1 + (s - 1) * q). Where it depends on size or number of steps: that of the
        recipe's size and eval_steps. ModelError for a grid that is no shifted one."""
        shape = self.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        shift = self._shift(sampling.eval_steps, shape)
        if shift is None:
            raise ModelError(f"{self.path}: the scheduler has no fixed shift; set algorithm.flow_shift in the recipe")
        return shift

    def _shift(self, num_steps: int, shape: Sequence[int]) -> float | None:
        config = self.pipeline.scheduler.config
        if config.get("use_karras_sigmas"):
            return None
        if config.get("use_dynamic_shifting"):
            mu = self.schedule_arguments(shape, num_steps).get("mu")
            # Of diffusers' two rules, mu / (mu + 1 / t - 1) and the same with e^mu, both are this shift.
            return None if mu is None else math.exp(mu) if config.time_shift_type == "exponential" else float(mu)
        shift = config.get("shift", config.get("flow_shift"))
        return None if shift is None else float(shift)

    def text_call(self) -> dict[str, Any]:
        """The arguments of the stock call that decide how prompts are encoded."""
        return {"max_sequence_length": self.max_sequence_length}

    def trained_call(self) -> dict[str, Any]:
        """The arguments of the stock call that training depends on: those of text_call, and an embedded guidance. An
        export notes them in call.json."""
        guidance = {} if self.embedded_guidance is None else {"guidance_scale": self.embedded_guidance}
        return {**self.text_call(), **guidance}

    def pipeline_call(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Keyword arguments, besides prompts, steps and noise, that make the stock pipeline do what we do.

        num_frames counts for video families.
        """
        return {"guidance_scale": w, "height": height, "width": width, **self.text_call()}


def stock_argument(pipeline: Any, name: str) -> Any:
    """The default that the pipeline's own call has for an argument. Its helpers may have others."""
    return inspect.signature(type(pipeline).__call__).parameters[name].default


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name is one of these, in which * stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the CPU's global generator draws from `seed`; afterwards it goes on undisturbed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU too
        yield


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Loading and saving inside draw no bars: with many ranks they would be all that a user sees."""
    libraries = [lib for lib in (diffusers.utils.logging, transformers.utils.logging) if lib.is_progress_bar_enabled()]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
