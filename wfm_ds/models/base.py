"""The interface between model families and training loops. Code outside `models/` must not branch on the family.

Latents, sigma and velocities are float32. The noise level `sigma` is in (0, 1], where 1 is pure noise. The velocity is
`eps - x0`.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.guardrail import Guardrail
from wfm_ds.models.assets.loading import read_json
from wfm_ds.models.assets.weight_files import fingerprint_folders
from wfm_ds.models.conditioning_frames import CONDITIONING_FRAME_KEYS
from wfm_ds.models.guidance import NEGATIVE_PASS, GuidancePass, choose_rows
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.lora_layer_names import LoraLayerName
from wfm_ds.models.noise_schedule import SIGMA_ERROR, NoiseSchedule
from wfm_ds.models.source_images import SourceImages, SourceSize, digest_pixels
from wfm_ds.recipe.sampling import GuidanceRecipe, SamplingRecipe
from wfm_ds.recipe.shared_defaults import DEFAULT_FPS
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.types import Conditioning


@dataclass(frozen=True, slots=True)
class NegativeText:
    """A text for `encode_negative_text`: a negative prompt, or the empty text that replaces a dropped caption."""

    text: str


@dataclass(frozen=True, slots=True)
class TextWithImages:
    """A formatted prompt or negative prompt for text encoders that also see images (DiffusionModel.text_inputs).

    Two objects are equal if their texts and pixels are equal.
    """

    text: str
    negative: bool
    images: tuple[npt.NDArray[np.uint8], ...] = field(compare=False, repr=False)  # [h,w,3] each
    digest: str = field(init=False)  # of the pixels

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", " ".join(map(digest_pixels, self.images)))


class DiffusionModel(NoiseSchedule, SourceImages):
    """A loaded diffusers pipeline behind one interface. Each model family is a subclass in a file of this package."""

    pipeline_classes: ClassVar[tuple[str, ...]]  # values of _class_name in model_index.json
    conditioning_keys: ClassVar[frozenset[str]]  # keys that encode_text returns and denoise expects
    default_lora_targets: tuple[str, ...]  # suffixes of linear layers; {} matches any block number
    lora_layer_names: ClassVar[tuple[LoraLayerName, ...]] = ()  # layer names in LoRA files of other tools
    comfyui_prefix: ClassVar[Literal["transformer", "diffusion_model"]] = "diffusion_model"  # prefix in LoRA files
    kohya_uses_diffusers_names: ClassVar[bool] = False  # otherwise kohya's LoRA files use the original names
    required_components: ClassVar[tuple[str, ...]]  # components that must not be null in model_index.json
    # Classes of the repeated blocks. torch.compile and low-precision weights are applied to these blocks only.
    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    prompt_templates: ClassVar[tuple[str, ...]] = ()  # values of model.prompt_template if the pipeline wraps prompts
    default_image_size: ClassVar[int | None] = None  # height and width in pixels if the config has no sample_size
    has_guardrail: ClassVar[bool] = False  # whether the pipeline has a safety checker
    supports_cuda_graphs: ClassVar[bool] = True  # False: the denoiser's forward pass copies data from the host
    guidance_arguments: ClassVar[tuple[str, ...]] = ("guidance_scale",)  # pipeline call arguments, one per expert
    guidance_keys: ClassVar[frozenset[str]] = frozenset()  # supported keys of sampling.guidance besides `interval`
    input_specs: ClassVar[Mapping[str, InputSpec]] = {}  # the inputs that data.inputs may name: actions, c2w, ...
    supported_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # {config file: {key: the only supported value}}
    text_inputs: ClassVar[frozenset[str]] = frozenset()  # image inputs that the text encoder also receives
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
        source_size: SourceSize = "target",
    ) -> None:
        """Freeze all components except the denoiser and move the pipeline to `device`.

        prompt_template: a name in `prompt_templates`. None selects the template that is stored with the pipeline.
        leave_denoiser: do not move the denoiser to `device`.
        fps: frames per second of all videos.
        inputs: names of the inputs in `input_specs` that every sample provides.
        embedded_guidance: guidance scale that the network receives as an input, if it supports this.
        source_size: size of source images, see `source_image_size`.
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
        self.source_size = source_size
        for part in self.auxiliary_modules():
            part.requires_grad_(False).eval()
        self.move_to_device(device)

    @classmethod
    def extra_components(cls, folder: Path, setting: Guardrail) -> dict[str, Any]:
        """Return {name: component} for components that no file stores. Raises ModelError if a package is missing."""
        return {}

    @classmethod
    def component_overrides(cls, folder: Path) -> dict[str, Any]:
        """Return {name: component} for components in model_index.json that diffusers would fail to load."""
        return {}

    @classmethod
    def has_embedded_guidance(cls, folder: Path) -> bool:
        """Return whether the network in this pipeline folder receives a guidance scale as an input."""
        return False

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """Raise ModelError if the family does not support the pipeline in this folder. Checks `supported_options`."""
        for file, options in cls.supported_options.items():
            config = read_json(folder / file)
            for key, value in options.items():
                found = config.get(key, value)
                if found != value and not (found is None and value is False):  # diffusers treats null like false
                    raise ModelError(
                        f"{folder / file}: {key} {json.dumps(found)} is not supported, only {json.dumps(value)}; use a "
                        "supported model (docs/models.md)"
                    )

    @classmethod
    def placeholder_components(cls) -> dict[str, Any]:
        """Return {name: placeholder} for components that the pipeline's constructor needs if no weights are loaded."""
        return {}

    @classmethod
    def needs_first_frame(cls, folder: Path) -> bool:
        return min(cls.conditioning_frame_counts) > 0

    @classmethod
    def default_guidance_scale(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        """Return the default guidance scale. index: model_index.json. call: default arguments of the pipeline call."""
        return float(call.get(cls.guidance_arguments[0], 1.0))

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        """Return the module that the engine trains. It contains all networks in `denoiser_components`."""
        denoiser: nn.Module = pipeline.transformer
        return denoiser

    def auxiliary_modules(self) -> list[nn.Module]:
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

    def prepare_for_lora(self, targets: Sequence[str]) -> None:
        """Prepare the denoiser for LoRA adapters. By default, this does nothing.

        targets: name suffixes of the linear layers that get an adapter.
        """

    def check_sampling(self, sampling: SamplingRecipe) -> None:
        """Raise ModelError for sampling settings that the diffusers pipeline does not support."""
        other_keys = sorted(GuidanceRecipe.model_fields.keys() - self.guidance_keys - {"interval"})
        if unsupported := sampling.guidance.non_default_keys(*other_keys):
            raise ModelError(f"{self.path}: {self.family} has no sampling.guidance.{unsupported[0]}: remove it")

    def stream_sizes(self, sampling: SamplingRecipe) -> Mapping[str, int]:
        """Return {stream: number of elements} for latents [B,N] with several streams, otherwise {}."""
        return {}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise ModelError if the pipeline's guardrail rejects a prompt."""

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        """Shell-style name patterns of denoiser parameters without gradients, which training does not change."""
        return ()

    def parameter_component(self, name: str) -> str:
        """Return the component that contains this denoiser parameter, or "" if there is only one component."""
        return name.partition(".")[0] if len(self.denoiser_components) > 1 else ""

    def find_unused_parameters(self) -> frozenset[str]:
        return frozenset(
            name
            for name, _ in self.unwrapped_denoiser.named_parameters()
            if matches_any_pattern(name, self.unused_parameter_patterns)
        )

    def format_prompt(
        self, text: str, height: int, width: int, num_frames: int, *, negative: bool = False, viewpoint: str = ""
    ) -> str:
        """Return the text to encode. Some pipelines append the size, the duration or data.viewpoint to the prompt."""
        return text

    @abstractmethod
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Encode prompts. Return {conditioning key: tensor [number of prompts, ...]} without gradients.

        Embeddings have the dtype of the text encoders. Masks are int64. Raises ValueError for an empty list.
        """

    def call_encode_prompt(self, prompts: Sequence[str], **options: Any) -> Any:
        """Return the result of the pipeline's encode_prompt. Raises ValueError unless `prompts` is a list of texts."""
        require_prompts(prompts)
        length = self.max_sequence_length
        return self.pipeline.encode_prompt(list(prompts), device=self.device, max_sequence_length=length, **options)

    def encode_negative_text(self, texts: Sequence[str]) -> Conditioning:
        """Encode negative prompts and dropped captions, without the instruction that some pipelines add to prompts."""
        return self.encode_text(texts)

    def encode_text_with_images(self, text: TextWithImages) -> Conditioning:
        """Encode a text for which the text encoder also sees images. Return {conditioning key: tensor [1, ...]}.

        Families with `text_inputs` must implement this method.
        """
        raise NotImplementedError(f"{self.family} has text_inputs: implement encode_text_with_images")

    def attach_images(
        self, texts: Sequence[str | NegativeText], inputs: Sequence[Mapping[str, npt.NDArray[Any]]]
    ) -> list[str | NegativeText | TextWithImages]:
        """Return the formatted texts, each with the images of the same sample that the text encoder also receives.

        inputs: the inputs of each text's sample (Prompt.inputs). Without `text_inputs`, returns the texts unchanged.
        """
        if not self.text_inputs:
            return list(texts)
        names = [name for name in self.source_names if name in self.text_inputs]
        return [
            TextWithImages(
                text.text if isinstance(text, NegativeText) else text,
                isinstance(text, NegativeText),
                tuple(sample[name] for name in names),
            )
            for text, sample in zip(texts, inputs, strict=True)
        ]

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[Any]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Encode inputs, such as actions. Return {conditioning key: tensor [number of samples, ...]}.

        The default implementation encodes source images only.
        inputs: {name: array} for each sample. Names that are not in `input_specs` are ignored.
        num_frames: number of video frames. size: (height, width) in pixels.
        Raises ValueError for arrays that the loaded checkpoint cannot use.
        """
        return self.encode_sources(inputs, size)

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes, without batch axis, of the tensors from `encode_inputs` for latents of this shape."""
        return self.source_shapes(shape)

    @property
    def supports_clean_frames(self) -> bool:
        """Whether the first latent frames of a sample can be clean instead of noisy (conditioning frames)."""
        return self.uses_clean_frames and max(self.conditioning_frame_counts) > 0

    def clean_frame_range(self, num_frames: tuple[int, int]) -> tuple[int, int]:
        """Return the range `num_frames` of conditioning frames, or (0, 0) if the model does not use clean frames."""
        return num_frames if self.uses_clean_frames else (0, 0)

    @property
    def text_dtype(self) -> torch.dtype:
        """The dtype of text embeddings, which is the dtype of the text encoders or, without text encoders, float32."""
        encoders = self.text_encoders().values()
        return next((parameter.dtype for encoder in encoders for parameter in encoder.parameters()), torch.float32)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape without batch axis} of the tensors from `encode_text`.

        The default implementation encodes an empty text, and raises ModelError on the meta device.
        """
        if self.device.type == "meta":
            raise ModelError(
                f"the family {self.family} has no text_shapes, which the estimate without weights needs: implement it"
            )
        return {name: tuple(tensor.shape[1:]) for name, tensor in self.encode_text([""]).items()}

    def conditioning_from_embedding(self, embedding: Tensor) -> Conditioning | None:
        """Convert one prompt's embedding [tokens, channels] to the format of `encode_text`.

        Returns None for a wrong shape.
        """
        return None

    def text_cache_key(self) -> dict[str, Any]:
        """Return everything that text embeddings depend on, except the text, as JSON values."""
        dtypes = {str(next(encoder.parameters()).dtype) for encoder in self.text_encoders().values()}
        return {
            "family": self.family,
            "parts": fingerprint_folders(self.path, self.text_folders()),
            "dtype": sorted(dtypes),
            **self.text_call_kwargs(),
        }

    def components_with_prefix(self, prefix: str) -> dict[str, Any]:
        parts = self.pipeline.components.items()
        return {name: part for name, part in parts if name.startswith(prefix) and part is not None}

    def text_encoders(self) -> dict[str, nn.Module]:
        """Return {component name: text encoder}, or {} after drop_text_encoders."""
        return self.components_with_prefix("text_encoder")

    def text_folders(self) -> list[str]:
        return [*self.text_encoders(), *self.components_with_prefix("tokenizer")]

    def drop_text_encoders(self) -> None:
        for name in self.text_encoders():
            setattr(self.pipeline, name, None)

    def move_text_encoders(self, device: torch.device | str) -> None:
        for encoder in self.text_encoders().values():
            encoder.to(device)

    def resolve_negative_prompt(self, negative_text: str | None = None) -> str:
        """Return `negative_text` or, if it is None, the pipeline's default negative prompt."""
        return "" if negative_text is None else negative_text

    @staticmethod
    def stack_conditioning(rows: Sequence[Conditioning]) -> Conditioning:
        """Concatenate conditioning tensors along the batch axis.

        Raises ValueError if shapes differ. Families with texts of variable length pad the texts instead.
        """
        for name in rows[0]:
            shapes = {tuple(row[name].shape[1:]) for row in rows}
            if len(shapes) > 1:
                raise ValueError(f"{name} has {' and '.join(str(list(shape)) for shape in sorted(shapes))}")
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    @abstractmethod
    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        """Predict the velocity eps - x0, float32 in the shape of the latents, in one forward pass without guidance.

        latents: [batch, channels, ...] float32. sigma: [batch] float32 in (0, 1].
        conditioning: tensors [batch, ...] from encode_text and encode_inputs.
        expert: index of the expert network, for models with two experts.
        Keeps the autograd graph. Raises ValueError for wrong shapes, dtypes or keys and, on a CPU, for wrong values of
        sigma.
        """

    @property
    def sigma_ranges(self) -> tuple[tuple[float, float], ...]:
        """The sigma range low <= sigma < high of each expert, as (low, high). The first range also includes 1."""
        return ((0.0, 1.0),)

    def select_expert(self, sigma: float) -> int:
        """Return the index of the expert network for this sigma. Rounding errors of sigma do not change the result."""
        return next(i for i, (low, _) in enumerate(self.sigma_ranges) if sigma >= low - SIGMA_ERROR)

    def check_denoise(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None
    ) -> None:
        """Raise ValueError if the arguments of `denoise` are invalid."""
        count, num_experts = latents.shape[0], len(self.sigma_ranges)
        layout, ndim = self.latent_layout
        if latents.ndim != ndim:
            raise ValueError(f"{self.family} takes latents {layout}, got {list(latents.shape)}")
        if expert is not None and not 0 <= expert < num_experts:
            raise ValueError(f"{self.family} has experts 0 to {num_experts - 1}, got {expert}")
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

    def draw_noise(self, seeds: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Draw the initial noise [B, *shape] of samples as the diffusers pipeline does. See draw_cpu_normal."""
        return draw_cpu_normal(seeds, shape, device)

    def guidance_passes(
        self, settings: SamplingRecipe, expert: int, sigma: float | None = None
    ) -> tuple[GuidancePass, ...]:
        """Return the passes of a guided prediction in addition to the conditional pass. (): no guidance.

        sigma: noise level of all samples. None: samples have different levels; returns the passes of all levels.
        """
        return (NEGATIVE_PASS,) if settings.guides(expert, sigma) else ()

    def combine_passes(
        self,
        cond: Tensor,
        others: Mapping[str, Tensor],
        latents: Tensor,
        sigma: Tensor,
        settings: SamplingRecipe,
        expert: int,
    ) -> Tensor:
        """Combine the predictions of the conditional pass and of `guidance_passes`, as the diffusers pipeline does.

        others: {name of a pass: prediction}. latents: the noisy latents. sigma: noise level of each sample [batch].
        Samples at other noise levels than those with guidance get their row of `cond`.
        """
        if NEGATIVE_PASS.name not in others:
            return cond
        guided = self.combine_guidance(cond, others[NEGATIVE_PASS.name], settings.expert_guidance_scale(expert))
        if settings.guidance.interval == (0.0, 1.0):
            return guided
        return choose_rows(sigma, *settings.guidance.interval, guided, cond)

    def combine_guidance(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """Return uncond + scale * (cond - uncond), which is exactly cond if scale is 1."""
        return uncond + scale * (cond - uncond)

    @abstractmethod
    def num_tokens(self, shape: Sequence[int]) -> int:
        """Return the number of denoiser tokens for latents of this shape, excluding text tokens."""

    def text_call_kwargs(self) -> dict[str, Any]:
        """Return the pipeline call arguments that affect prompt encoding."""
        return {"max_sequence_length": self.max_sequence_length}

    def export_call_kwargs(self) -> dict[str, Any]:
        """Return the arguments that an export stores in call.json: text arguments and the embedded guidance scale."""
        guidance = {} if self.embedded_guidance is None else {"guidance_scale": self.embedded_guidance}
        return {**self.text_call_kwargs(), **guidance}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments, except prompts, number of steps and noise.

        w: guidance scale. height, width: size in pixels. num_frames: ignored by image families.
        """
        frames = {"num_frames": num_frames} if self.is_video else {}
        return {self.guidance_arguments[0]: w, "height": height, "width": width, **frames, **self.text_call_kwargs()}

    def guider_config(self, w: float) -> dict[str, Any] | None:
        """Return the config of the pipeline's component `guider` for guidance scale w.

        None: the pipeline has no guider, and its call takes the guidance scale.
        """
        guider = self.pipeline.components.get("guider")
        return None if guider is None else {**json.loads(guider.to_json_string()), "guidance_scale": w}


def pipeline_call_default(pipeline: Any, name: str) -> Any:
    return inspect.signature(type(pipeline).__call__).parameters[name].default


def require_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts must be a list of at least one text, got {prompts!r}")


def matches_any_pattern(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seed the global CPU generator inside the context, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        yield
