"""The interface between model families and training loops. Code outside `models/` must not branch on the family.

Latents, sigma and velocities are float32. The noise level `sigma` is in (0, 1], where 1 is pure noise. The velocity is
`eps - x0`.
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
from wfm_ds.models.assets.weight_files import fingerprint_folders
from wfm_ds.models.conditioning_frames import CONDITIONING_FRAME_KEYS
from wfm_ds.pinned_memory import copy_to_device
from wfm_ds.recipe.shared_defaults import DEFAULT_FPS
from wfm_ds.sampling.plan import apply_shift

if TYPE_CHECKING:
    from wfm_ds.models.assets.guardrail import Guardrail
    from wfm_ds.models.input_specs import InputSpec
    from wfm_ds.models.lora_layer_names import LoraLayerName
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.types import Conditioning


MAX_SIZE_MULTIPLE = 1024  # largest multiple of height and width to try, in pixels


@dataclass(frozen=True, slots=True)
class NegativeText:
    """A negative prompt, or the empty text that replaces a dropped caption. `encode_negative_text` encodes it."""

    text: str


class DiffusionModel(ABC):
    """A loaded diffusers pipeline behind one interface: encode text, convert pixels and latents, call the denoiser.

    Each model family is a subclass in its own file in this folder. `registry.model_families` discovers the subclasses.
    """

    family: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]  # values of _class_name in model_index.json
    conditioning_keys: ClassVar[frozenset[str]]  # keys that encode_text returns and denoise expects
    default_lora_targets: tuple[str, ...]  # suffixes of linear layers; {} is a block number
    lora_layer_names: ClassVar[tuple[LoraLayerName, ...]] = ()  # layer names in LoRA files of other tools
    comfyui_prefix: ClassVar[Literal["transformer", "diffusion_model"]] = "diffusion_model"  # prefix in LoRA files
    required_components: ClassVar[tuple[str, ...]]  # components that must not be null in model_index.json
    block_classes: ClassVar[tuple[type[nn.Module], ...]]  # for gradient checkpointing, ZeRO-3 leaves, torch.compile
    is_video: ClassVar[bool] = False  # pixels [B,3,F,H,W], latents [B,C,T,h,w], also for one frame
    prompt_templates: ClassVar[tuple[str, ...]] = ()  # choices for the recipe if the pipeline wraps prompts
    default_image_size: ClassVar[int | None] = None  # in pixels, if the config has no sample_size
    has_guardrail: ClassVar[bool] = False  # whether the pipeline has a safety checker
    input_specs: ClassVar[Mapping[str, InputSpec]] = {}  # the inputs that data.inputs may name: actions, c2w, ...
    # Defaults of the family. An instance may override them, depending on the loaded pipeline.
    denoiser_components: tuple[str, ...] = ("transformer",)  # names in model_index.json; Wan 2.2 has two
    conditioning_frame_counts: tuple[int, ...] = (0,)  # allowed numbers of conditioning latent frames
    optional_conditioning_keys: frozenset[str] = frozenset()  # keys that encode_inputs may add
    uses_clean_frames: bool = True
    """Whether clean conditioning frames replace the first noisy latent frames. If False, the network takes the first
    frame as a separate input (FIRST_FRAME) and denoises all latent frames."""

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
        fps: float = DEFAULT_FPS,
        inputs: Collection[str] = (),
        embedded_guidance: float | None = None,
    ) -> None:
        """Freeze all components except the denoiser and move the pipeline to `device`.

        prompt_template: one of prompt_templates. None selects the template that is stored with the pipeline.
        leave_denoiser: do not move the denoiser to `device`, because the training engine does it later.
        fps: frames per second of all videos. Some networks are conditioned on it.
        inputs: names of the inputs in `input_specs` that every sample provides.
        embedded_guidance: guidance scale that a network with embedded guidance receives as an input.
        Raises ModelError if the scheduler is not a flow-matching scheduler.
        """
        if not hasattr(pipeline.scheduler, "sigmas"):
            name = type(pipeline.scheduler).__name__
            raise ModelError(f"{path}: {name} is not a flow-matching scheduler; use the pipeline's original scheduler")
        self.pipeline = pipeline
        self.path = path
        self.dtype = dtype  # compute dtype of the denoiser
        self.leave_denoiser = leave_denoiser
        self.unwrapped_denoiser = self.extract_denoiser(pipeline)
        self.denoiser = self.unwrapped_denoiser  # the engine replaces it with its wrapper
        self.config = pipeline.transformer.config  # still available when the denoiser is wrapped
        self.max_sequence_length = max_sequence_length or pipeline_call_default(pipeline, "max_sequence_length")
        self.prompt_template = prompt_template
        self.fps = fps
        self.input_names = frozenset(inputs)
        self.embedded_guidance = embedded_guidance  # None: the network has no such input
        for part in self.auxiliary_modules():
            part.requires_grad_(False).eval()
        self.move_to_device(device)

    @classmethod
    def extra_components(cls, folder: Path, setting: Guardrail) -> dict[str, Any]:
        """Return {name: component} for components that the pipeline folder does not contain.

        Raises ModelError if such a component is not available.
        """
        return {}

    @classmethod
    def component_overrides(cls, folder: Path) -> dict[str, Any]:
        """Return {name: component} for components in model_index.json that diffusers would fail to load."""
        return {}

    @classmethod
    def has_embedded_guidance(cls, folder: Path) -> bool:
        """Return whether the network in this pipeline folder receives a guidance scale as an input."""
        return False

    @classmethod  # noqa: B027, optional hook
    def check_folder(cls, folder: Path) -> None:
        """Raise ModelError for an unsupported variant of a supported pipeline class. Called before loading."""

    @classmethod
    def placeholder_components(cls) -> dict[str, Any]:
        """Return {name: placeholder} for components that the pipeline's constructor needs on the meta device."""
        return {}

    @classmethod
    def needs_first_frame(cls, folder: Path) -> bool:
        return min(cls.conditioning_frame_counts) > 0

    @classmethod
    def default_guidance_scale(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        """Return the default guidance scale w.

        index: content of model_index.json. call: default arguments of the pipeline's `__call__`.
        """
        return float(call.get("guidance_scale", 1.0))

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        """Return the module that the engine trains.

        This is the pipeline's network, or a module that contains all networks in `denoiser_components`.
        """
        denoiser: nn.Module = pipeline.transformer
        return denoiser

    def auxiliary_modules(self) -> list[nn.Module]:
        """Return all modules of the pipeline except the denoiser: VAE, text encoders and others."""
        parts = self.pipeline.components.items()
        return [part for name, part in parts if isinstance(part, nn.Module) and name not in self.denoiser_components]

    def move_to_device(self, device: torch.device | str) -> None:
        """Move the pipeline to a device, except a denoiser that the training engine manages."""
        self.device = torch.device(device)
        parts = self.auxiliary_modules()
        if self.denoiser is self.unwrapped_denoiser and not self.leave_denoiser:
            parts.append(self.denoiser)
        for part in parts:
            part.to(self.device)

    def prepare_for_lora(self, targets: Sequence[str]) -> None:  # noqa: B027, optional hook
        """Prepare the denoiser for LoRA adapters on the linear layers that `targets` selects.

        targets: suffixes of layer names.
        A family may override this method to move frozen layers into encode_text, which runs only once per prompt.
        """

    def check_sampling(self, sampling: SamplingRecipe) -> None:  # noqa: B027, optional hook
        """Raise ModelError for sampling settings that the diffusers pipeline does not support."""

    def check_prompts(self, prompts: Sequence[str]) -> None:  # noqa: B027, optional hook
        """Raise ModelError if the pipeline's guardrail rejects a prompt. Called before samples are generated."""

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        """Shell patterns that match the names of denoiser parameters without gradients.

        Full training and exports leave these parameters unchanged. Adapters on them have no effect.
        """
        return ()

    def parameter_component(self, name: str) -> str:
        """Return the component name of the expert network that contains this denoiser parameter.

        Returns "" if the denoiser has no expert networks.
        """
        return name.partition(".")[0] if len(self.denoiser_components) > 1 else ""

    def find_unused_parameters(self) -> frozenset[str]:
        return frozenset(
            name
            for name, _ in self.unwrapped_denoiser.named_parameters()
            if matches_any_pattern(name, self.unused_parameter_patterns)
        )

    def format_prompt(self, text: str, height: int, width: int, num_frames: int, *, negative: bool = False) -> str:
        """Return the text to encode for a prompt and a size in pixels.

        Some pipelines append the size and duration to the prompt.
        """
        return text

    @abstractmethod
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Encode B prompts. Return {name: tensor [B, ...]} without gradients.

        Embeddings have the dtype of the text encoders. Masks are int64. Use encode_negative_text for negative prompts.
        Raises ValueError for an empty list.
        """

    def encode_negative_text(self, texts: Sequence[str]) -> Conditioning:
        """Encode negative prompts and dropped captions. The default calls `encode_text`.

        Override this method if the pipeline adds an instruction to prompts but not to negative prompts.
        """
        return self.encode_text(texts)

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Encode inputs, such as actions, of B samples. Return {name: tensor [B, ...]}.

        The names in the result are from `optional_conditioning_keys`.
        inputs: {name from input_specs: array} for each sample.
        num_frames: number of video frames. size: (height, width) in pixels.
        Raises ValueError for arrays that the loaded checkpoint cannot use.
        """
        return {}

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} for the tensors from `encode_inputs` that the network requires.

        The shapes have no batch axis. shape: shape of one sample's latents.
        """
        return {}

    @property
    def supports_clean_frames(self) -> bool:
        """Whether the first latent frames of a sample can be clean instead of noisy (conditioning frames)."""
        return self.uses_clean_frames and max(self.conditioning_frame_counts) > 0

    def clean_frame_range(self, num_frames: tuple[int, int]) -> tuple[int, int]:
        """Return the minimum and maximum number of clean conditioning frames.

        num_frames: minimum and maximum in the recipe. Returns (0, 0) if the family has no clean conditioning frames.
        """
        return num_frames if self.uses_clean_frames else (0, 0)

    @property
    def text_dtype(self) -> torch.dtype:
        """The dtype of text embeddings. It is the dtype of the text encoders, or float32 without text encoders."""
        encoders = self.text_encoders().values()
        return next((parameter.dtype for encoder in encoders for parameter in encoder.parameters()), torch.float32)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} for the tensors from `encode_text`. The shapes have no batch axis."""
        return {name: tuple(tensor.shape[1:]) for name, tensor in self.encode_text([""]).items()}

    def conditioning_from_embedding(self, embedding: Tensor) -> Conditioning | None:
        """Convert one prompt's precomputed embedding [n tokens, D channels] to the format of `encode_text`.

        Returns None if the shape does not match this model's text encoder, or if the family has several encoders.
        """
        return None

    def text_cache_key(self) -> dict[str, Any]:
        """Return a JSON object that changes if any property that affects text embeddings changes.

        The properties are the files of text encoders and tokenizers, the dtype, and the settings of encode_text.
        """
        dtypes = {str(next(encoder.parameters()).dtype) for encoder in self.text_encoders().values()}
        return {
            "family": self.family,
            "parts": fingerprint_folders(self.path, self.text_folders()),
            "dtype": sorted(dtypes),
            **self.text_call_kwargs(),
        }

    def latent_cache_key(self) -> dict[str, Any]:
        """Return a JSON object that changes if any property that affects the latents from encode_pixels changes.

        The properties are the VAE files and the dtype of the VAE.
        """
        dtype = str(next(self.pipeline.vae.parameters()).dtype)
        return {"family": self.family, "parts": fingerprint_folders(self.path, ["vae"]), "dtype": dtype}

    def components_with_prefix(self, prefix: str) -> dict[str, Any]:
        """Return {name: component} for the pipeline components with this name prefix. Omits missing components."""
        parts = self.pipeline.components.items()
        return {name: part for name, part in parts if name.startswith(prefix) and part is not None}

    def text_encoders(self) -> dict[str, nn.Module]:
        """Return {component name: text encoder}. The result is empty after a call of drop_text_encoders."""
        return self.components_with_prefix("text_encoder")

    def text_folders(self) -> list[str]:
        """Return the names of the subfolders that contain text encoders and tokenizers."""
        return [*self.text_encoders(), *self.components_with_prefix("tokenizer")]

    def drop_text_encoders(self) -> None:
        """Free the memory of the text encoders. No text can be encoded afterwards."""
        for name in self.text_encoders():
            setattr(self.pipeline, name, None)

    def move_text_encoders(self, device: torch.device | str) -> None:
        for encoder in self.text_encoders().values():
            encoder.to(device)

    def resolve_negative_prompt(self, negative_text: str | None = None) -> str:
        """Return the negative prompt for guidance.

        This is `negative_text`, or the pipeline's default if `negative_text` is None.
        """
        return "" if negative_text is None else negative_text

    @staticmethod
    def repeat_conditioning(conditioning: Conditioning, k: int) -> Conditioning:
        """Repeat the tensors of each prompt k times, like torch.repeat_interleave.

        The result equals encoding each prompt k times.
        """
        return {name: tensor.repeat_interleave(k, dim=0) for name, tensor in conditioning.items()}

    @staticmethod
    def stack_conditioning(rows: Sequence[Conditioning]) -> Conditioning:
        """Concatenate conditioning tensors along the batch axis.

        Raises ValueError if the tensors of different prompts differ in shape. Families with texts of variable length
        override this method and pad the texts.
        """
        for name in rows[0]:
            shapes = {tuple(row[name].shape[1:]) for row in rows}
            if len(shapes) > 1:
                raise ValueError(f"{name} has {' and '.join(str(list(shape)) for shape in sorted(shapes))}")
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Encode float32 pixels in [0, 1] to normalized float32 latents.

        Images [B,3,H,W] become [B,C,h,w]. Video families convert [B,3,F,H,W] to [B,C,T,h,w]. Raises ValueError for
        other shapes or dtypes.
        """
        layout, ndim = ("[B,3,F,H,W]", 5) if self.is_video else ("[B,3,H,W]", 4)
        if pixels.ndim != ndim or pixels.shape[1] != 3 or pixels.dtype != torch.float32:
            raise ValueError(f"pixels must be float32 {layout}, got {pixels.dtype} {list(pixels.shape)}")
        height, width = pixels.shape[-2:]
        self.latent_shape(height, width, pixels.shape[2] if self.is_video else 1)
        shifted = 2 * pixels.to(self.device) - 1
        parts = torch.split(shifted, self.encode_batch_size(pixels))
        return torch.cat(list(map(self.to_latents, parts)))

    def encode_batch_size(self, pixels: Tensor) -> int:
        """Return the number of samples to encode together.

        It is 1 for videos, so that cached latents do not depend on the batch.
        """
        if self.is_video:
            return 1
        height, width = pixels.shape[-2:]
        return len(pixels) if self.device.type == "cpu" else vae.max_batch_size(self.pipeline.vae, height * width)

    def encode_uint8(self, media: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
        """Encode uint8 images [H,W,3] or videos [F,H,W,3]. All arrays must have the same shape.

        Video families treat an image as a video with one frame.
        """
        videos = [torch.from_numpy(m if m.ndim == 4 else m[None]) for m in media]
        frames = copy_to_device(torch.stack(videos), self.device)
        pixels = frames.permute(0, 4, 1, 2, 3).float() / 255
        return self.encode_pixels(pixels if self.is_video else pixels.squeeze(2))

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decode normalized latents to float32 pixels in [0, 1], in the shape that `encode_pixels` accepts."""
        return (self.to_pixels(latents.to(self.device)) / 2 + 0.5).clamp(0, 1)

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Encode float32 pixels in [-1, 1] to normalized float32 latents. The pixels must be on the model's device."""
        return vae.encode_normalized(self.pipeline.vae, pixels)

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Decode normalized float32 latents to float32 pixels, roughly in [-1, 1].

        The latents must be on the model's device.
        """
        return vae.decode_normalized(self.pipeline.vae, latents)

    @staticmethod
    def quantize_pixels(pixels: Tensor) -> Tensor:
        """Round pixels in [0, 1] to uint8 values 0 to 255."""
        return (255 * pixels.clamp(0, 1)).round().to(torch.uint8)

    @staticmethod
    def to_uint8(pixels: Tensor) -> npt.NDArray[np.uint8]:
        """Convert pixels in [0, 1] from [B,3,H,W] to uint8 [B,H,W,3], or from [B,3,F,H,W] to [B,F,H,W,3]."""
        return np.ascontiguousarray(DiffusionModel.quantize_pixels(pixels).cpu().movedim(1, -1).numpy())

    @abstractmethod
    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        """Predict the velocity eps - x0 in one forward pass. Keeps the autograd graph.

        Returns float32 in the shape of the latents. The method does not apply guidance.
        latents: [B,C,...] float32. sigma: [B] float32 in (0, 1].
        conditioning: tensors [B, ...] from encode_text and encode_inputs.
        expert: index of the expert network, for models with two experts.
        Raises ValueError for wrong shapes, dtypes or keys. Values of sigma are checked only on the CPU, because the
        check would make the host wait for a GPU.
        """

    @property
    def sigma_ranges(self) -> tuple[tuple[float, float], ...]:
        """(low, high) for each expert network, which runs for low <= sigma < high. The first range includes 1."""
        return ((0.0, 1.0),)

    def select_expert(self, sigma: float) -> int:
        """Return the index of the expert network for this sigma."""
        return next(i for i, (low, _) in enumerate(self.sigma_ranges) if sigma >= low)

    def check_denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> None:
        """Raise ValueError if arguments of `denoise` are invalid. All tensors must have the same batch size."""
        count = latents.shape[0]
        if latents.dtype != torch.float32:
            raise ValueError(f"latents must be float32, got {latents.dtype}")
        if sigma.shape != (count,) or sigma.dtype != torch.float32:
            raise ValueError(f"sigma must be float32 [{count}], got {sigma.dtype} {list(sigma.shape)}")
        if sigma.device.type == "cpu" and not bool(((sigma > 0) & (sigma <= 1)).all()):
            raise ValueError(f"sigma must be above 0 and at most 1, got {sigma.tolist()}")
        optional = self.optional_conditioning_keys | (
            CONDITIONING_FRAME_KEYS if self.supports_clean_frames else frozenset[str]()
        )
        if conditioning.keys() - optional != self.conditioning_keys:
            raise ValueError(f"conditioning must hold {sorted(self.conditioning_keys)}, got {sorted(conditioning)}")
        for name, tensor in conditioning.items():
            if tensor.shape[0] != count:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, the latents have {count}")

    def combine_guidance(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """Return uncond + scale * (cond - uncond). If scale is 1, the result is exactly cond."""
        return uncond + scale * (cond - uncond)

    @abstractmethod
    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample's latents: (C,h,w) for image families, (C,T,h,w) for video families.

        Raises ValueError for an unsupported size. The message names the number that must divide height and width.
        """

    def size_multiple(self, num_frames: int = 1) -> int:
        """Return the number of pixels that must divide height and width."""

        def exists(size: int) -> bool:
            try:
                self.latent_shape(size, size, num_frames)
            except ValueError:
                return False
            return True

        return next(size for size in range(1, MAX_SIZE_MULTIPLE + 1) if exists(size))

    @abstractmethod
    def num_tokens(self, shape: Sequence[int]) -> int:
        """Return the number of denoiser tokens for latents of this shape, excluding text tokens."""

    def sigmas(self, num_steps: int, shape: Sequence[int]) -> Tensor:
        """Return the sigmas of the pipeline's scheduler for this latent shape.

        The result is float64 [num_steps + 1] on the CPU and decreases to 0. Raises ModelError if the scheduler's
        sigmas do not decrease from at most 1 to 0.
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
                f"{self.path}: the sigmas of {num_steps} steps of {type(scheduler).__name__} do not decrease from at "
                f"most 1 to 0 ({grid.tolist()}); use a flow-matching scheduler or fewer steps"
            )
        return grid

    def rollout_sigmas(self, sampling: SamplingRecipe) -> Tensor:
        """Return the sigmas that sampling.grid specifies for rollouts, float64 [sampling.steps + 1] on the CPU.

        Raises ModelError if sampling.grid needs a fixed timestep shift and the scheduler has none.
        """
        num_steps, shape = sampling.steps, self.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        if sampling.grid == "stock":
            return self.sigmas(num_steps, shape)
        shift = self._scheduler_shift(num_steps, shape)
        if shift is None:
            raise ModelError(f"{self.path}: the scheduler has no fixed shift: set sampling.grid: stock")
        q = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps
        return apply_shift(q, shift)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        """Return the pipeline's arguments for scheduler.set_timesteps, without num_inference_steps.

        If the result contains `sigmas`, they replace num_inference_steps. They are not yet shifted.
        """
        return {}

    @property
    def default_solver(self) -> str:
        """The solver that fits the pipeline's scheduler: `dpm2` if its solver_order exceeds 1, otherwise `ode`."""
        return "dpm2" if self.pipeline.scheduler.config.get("solver_order", 1) > 1 else "ode"

    def flow_shift(self, sampling: SamplingRecipe) -> float:
        """Return the scheduler's timestep shift s: sigma = s * q / (1 + (s - 1) * q) for q in [0, 1].

        If the shift depends on size or number of steps, it is computed for the recipe's size and eval_steps. Raises
        ModelError if the scheduler has no timestep shift.
        """
        shape = self.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        shift = self._scheduler_shift(sampling.eval_steps, shape)
        if shift is None:
            raise ModelError(f"{self.path}: the scheduler has no fixed shift; set algorithm.flow_shift")
        return shift

    def _scheduler_shift(self, num_steps: int, shape: Sequence[int]) -> float | None:
        config = self.pipeline.scheduler.config
        if config.get("use_karras_sigmas"):
            return None
        if config.get("use_dynamic_shifting"):
            mu = self.schedule_arguments(shape, num_steps).get("mu")
            # diffusers computes mu / (mu + 1 / t - 1), or the same with e^mu. Both are a shift as in flow_shift.
            return None if mu is None else math.exp(mu) if config.time_shift_type == "exponential" else float(mu)
        shift = config.get("shift", config.get("flow_shift"))
        return None if shift is None else float(shift)

    def text_call_kwargs(self) -> dict[str, Any]:
        """Return the pipeline call arguments that affect prompt encoding."""
        return {"max_sequence_length": self.max_sequence_length}

    def export_call_kwargs(self) -> dict[str, Any]:
        """Return the pipeline call arguments that an export writes to call.json.

        These arguments affect prompt encoding or set the embedded guidance scale.
        """
        guidance = {} if self.embedded_guidance is None else {"guidance_scale": self.embedded_guidance}
        return {**self.text_call_kwargs(), **guidance}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments for guidance scale w and this size in pixels.

        The result does not include prompts, number of steps or noise.
        """
        return {"guidance_scale": w, "height": height, "width": width, **self.text_call_kwargs()}


def pipeline_call_default(pipeline: Any, name: str) -> Any:
    return inspect.signature(type(pipeline).__call__).parameters[name].default


def matches_any_pattern(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seed the global CPU generator inside the context and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        yield


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Disable the progress bars of diffusers and transformers in the `with` block.

    Otherwise, the progress bars of all ranks would flood the log.
    """
    libraries = [lib for lib in (diffusers.utils.logging, transformers.utils.logging) if lib.is_progress_bar_enabled()]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
