"""Cosmos3 (Edge, Nano, Super): Text2World, Image2World, Video2World and forward dynamics (videos from actions)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    _ACTION_VIEWPOINT_TEMPLATES,
    _SYSTEM_PROMPT_IMAGE,
    _SYSTEM_PROMPT_VIDEO,
)
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.guardrail import Guardrail
from wfm_ds.models.base import require_prompts
from wfm_ds.models.conditioning_frames import get_clean_frames
from wfm_ds.models.cosmos3_towers import TEXT_TOWER_LAYERS, GenerationLayer, TextTower, split_towers
from wfm_ds.models.cosmos25 import CosmosModel
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.lora_layer_names import TEXT_ATTENTION_LAYERS
from wfm_ds.models.text_padding import pad_and_stack
from wfm_ds.models.vae import count_latent_frames, require_multiples
from wfm_ds.types import Conditioning
from wfm_ds.ulysses.cosmos3 import token_grid

TEXT_KEYS = ("text_keys", "text_values", "text_mask")
ASSUMED_TEXT_TOKENS = 512  # text length for memory estimates, because the pipeline does not truncate text
UNUSED_HEADS = ("audio_*", "action_proj_out.*")  # heads for audio and action prediction, which is not supported
ACTION_LAYERS = ("action_*",)
OTHER_VIEWPOINTS = {
    "top_down_2d_view": "This video is captured from a top-down view of a flat 2D scene.",
    "video_game_view": "This video is captured from an in-game camera perspective in a virtual environment.",
}
"""Caption sentences that the diffusers pipeline lacks, from cosmos-framework (action/utils/viewpoint_utils.py)."""
SYSTEM_PROMPTS = {True: _SYSTEM_PROMPT_IMAGE, False: _SYSTEM_PROMPT_VIDEO}  # key: whether the sample is an image


class Cosmos3(CosmosModel):
    """Cosmos3. The network receives 1000 * sigma as its timestep, and returns the velocity."""

    family = "cosmos3"
    pipeline_classes = ("Cosmos3OmniPipeline",)
    required_components = ("transformer", "vae", "scheduler", "text_tokenizer")
    conditioning_keys = frozenset(TEXT_KEYS)
    optional_conditioning_keys = frozenset({"actions", "domain"})
    input_specs: ClassVar[Mapping[str, InputSpec]] = MappingProxyType(
        {"actions": InputSpec(rank=2), "domain": InputSpec(rank=0, requires_input="actions")}
    )
    default_lora_targets = TEXT_ATTENTION_LAYERS
    block_classes = (GenerationLayer,)

    def __init__(self, pipeline: Any, path: Path, *, max_sequence_length: int | None = None, **options: Any) -> None:
        """Split the network into text tower and generation tower. Raises ModelError if max_sequence_length is set."""
        if max_sequence_length is not None:
            raise ModelError(f"{path}: Cosmos3 does not truncate prompts; remove model.max_sequence_length")
        super().__init__(pipeline, path, max_sequence_length=ASSUMED_TEXT_TOKENS, **options)
        tower: Any = self.unwrapped_denoiser
        tower.fps, tower.temporal_compression = self.fps, self.pipeline.vae_scale_factor_temporal

    @classmethod
    def extra_components(cls, folder: Path, setting: Guardrail) -> dict[str, Any]:
        return {**super().extra_components(folder, setting), "enable_safety_checker": True}

    @classmethod
    def placeholder_components(cls) -> dict[str, Any]:
        return {"text_tokenizer": PlaceholderTokenizer()}

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        text, tower = split_towers(pipeline.transformer)
        self.text_tower: TextTower | None = text.to(self.dtype)
        pipeline.transformer = tower
        pipeline.sound_tokenizer = None  # sound is not supported
        return tower

    def auxiliary_modules(self) -> list[nn.Module]:
        return [*super().auxiliary_modules(), *self.text_encoders().values()]

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        return (*TEXT_TOWER_LAYERS, *UNUSED_HEADS, *(() if "actions" in self.input_names else ACTION_LAYERS))

    def text_encoders(self) -> dict[str, nn.Module]:
        return {} if self.text_tower is None else {"text_tower": self.text_tower}

    def text_folders(self) -> list[str]:
        return ["transformer", "text_tokenizer"]

    def drop_text_encoders(self) -> None:
        self.text_tower = None

    @property
    def text_dtype(self) -> torch.dtype:
        return self.dtype

    def format_prompt(
        self, text: str, height: int, width: int, num_frames: int, *, negative: bool = False, viewpoint: str = ""
    ) -> str:
        """Format a prompt as the diffusers pipeline does.

        If the model does not receive actions, sentences about size and duration are appended. Negative prompts get the
        negated sentences.
        If the model receives actions, a prompt becomes a JSON object with size, duration and viewpoint (default
        ego_view). Negative prompts and prompts that are already JSON objects stay unchanged.
        Some pipelines also prepend a system prompt.
        """
        is_image = num_frames == 1
        if "actions" not in self.input_names:
            text = self.append_size_sentences(text, height, width, num_frames, negative)
        elif not negative and not text.lstrip().startswith("{"):
            text = self.pipeline._build_action_json_prompt(
                text, view_point=None, num_frames=num_frames, fps=self.fps, height=height, width=width
            )
            viewpoint = viewpoint or "ego_view"
            framing = {**_ACTION_VIEWPOINT_TEMPLATES, **OTHER_VIEWPOINTS}.get(viewpoint, viewpoint)
            text = json.dumps({"cinematography": {"framing": framing}, **json.loads(text)})
        return f"{SYSTEM_PROMPTS[is_image]}\n{text}" if self.pipeline.config.default_use_system_prompt else text

    def append_size_sentences(self, text: str, height: int, width: int, num_frames: int, negative: bool) -> str:
        pipeline, is_image = self.pipeline, num_frames == 1
        prefix = "inverse_" if negative else ""
        resolution = getattr(pipeline, f"{prefix}{'image' if is_image else 'video'}_resolution_template")
        sentences = [resolution.format(height=height, width=width)]
        if not is_image:
            duration = getattr(pipeline, f"{prefix}duration_template")
            sentences.insert(0, duration.format(duration=num_frames / self.fps, fps=self.fps))
        for sentence in sentences:
            text = text.rstrip(".")
            text = f"{text}. {sentence}" if text else sentence
        return text

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return the attention keys and values of the texts in all layers of the text tower, and a mask.

        text_keys, text_values: [batch, text tokens, layers, key-value heads, channels per head]. Shorter prompts are
        padded with zeros. text_mask: int64 [batch, text tokens], 0 on padding.
        """
        require_prompts(prompts)
        assert self.text_tower is not None, "the text tower was dropped"
        rows = []
        for prompt in prompts:
            ids = torch.tensor(self.tokenize_prompt(prompt), device=self.device)
            keys, values = self.text_tower(ids)
            rows.append(dict(zip(TEXT_KEYS, (keys[None], values[None], torch.ones_like(ids)[None]), strict=True)))
        return self.stack_conditioning(rows)

    def tokenize_prompt(self, caption: str) -> list[int]:
        """Return a prompt's token ids in the chat template, up to the start-of-generation token."""
        head, newline, rest = caption.partition("\n")
        turns = [{"role": "user", "content": caption}]
        if newline and head in SYSTEM_PROMPTS.values():
            turns = [{"role": "system", "content": head}, {"role": "user", "content": rest}]
        encoded = self.pipeline.text_tokenizer.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=True, add_vision_id=False, return_dict=True
        )
        special_tokens = self.pipeline.llm_special_tokens
        return [*encoded.input_ids, special_tokens["eos_token_id"], special_tokens["start_of_generation"]]

    @staticmethod
    def stack_conditioning(rows: Sequence[Conditioning]) -> Conditioning:
        return pad_and_stack(rows, TEXT_KEYS)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config, length = self.config, self.max_sequence_length
        shape = (length, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        return {"text_keys": shape, "text_values": shape, "text_mask": (length,)}

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Return {actions: float32 [batch, num_frames - 1, channels], domain: int64 [batch]}, or {} without actions.

        Actions are zero-padded to the network's number of action channels. The domain is the robot type (default 0).
        Raises ValueError for wrong action shapes, an unknown domain, a network without action support, or a batch in
        which only some samples have actions.
        """
        if not any("actions" in row for row in inputs):
            return {}
        if not self.config.action_gen:
            raise ValueError(f"{self.path}: this network does not support actions (action_gen is off)")
        if not all("actions" in row for row in inputs):
            raise ValueError("either all samples of a batch must have actions or none")
        width, domains = self.config.action_dim, self.config.num_embodiment_domains
        actions = torch.zeros(len(inputs), num_frames - 1, width)
        for row, sample in zip(actions, inputs, strict=True):
            array = sample["actions"]
            if array.ndim != 2 or len(array) != num_frames - 1 or not 0 < array.shape[1] <= width:
                raise ValueError(f"actions must be [{num_frames - 1}, 1 to {width}], got {list(array.shape)}")
            row[:, : array.shape[1]] = torch.from_numpy(np.asarray(array, np.float32))
        numbers = [float(row.get("domain", 0)) for row in inputs]
        if not all(number.is_integer() and 0 <= number < domains for number in numbers):
            raise ValueError(f"domain must be an integer from 0 to {domains - 1}, got {numbers}")
        domain = torch.tensor([int(number) for number in numbers])
        return {"actions": actions.to(self.device), "domain": domain.to(self.device)}

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        frames = get_clean_frames(conditioning)
        free = latents.new_ones(len(latents), latents.shape[2]) if frames is None else 1 - frames.mask.flatten(1)
        velocity: Tensor = self.denoiser(
            latents=(latents if frames is None else frames.insert_clean_latents(latents)).to(self.dtype),
            time=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            free=free,
            **{name: conditioning[name] for name in TEXT_KEYS},
            **{name: conditioning[name] for name in sorted(self.optional_conditioning_keys & conditioning.keys())},
        )[0].float()
        return velocity if frames is None else frames.insert_known_velocity(velocity, latents, sigma)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (channels, (F - 1) / 4 + 1, H / f, W / f) for F frames of H x W pixels and VAE scale factor f."""
        factor, frames_factor = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        num_latent_frames = count_latent_frames(num_frames, frames_factor)
        require_multiples(height, width, factor)
        return (self.config.latent_channel, num_latent_frames, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return math.prod(token_grid(self.config, shape[1:]))

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        if not self.pipeline.config.use_native_flow_schedule:
            return {}
        first = 1 - 1 / self.pipeline.scheduler.config.num_train_timesteps
        return {"sigmas": np.linspace(first, 0.0, num_steps + 1)[:-1]}

    def text_call_kwargs(self) -> dict[str, Any]:
        return {}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        return {**super().pipeline_call_kwargs(w, height, width, num_frames), "fps": self.fps}


class PlaceholderTokenizer:
    """A tokenizer that has only the attributes that the pipeline's constructor needs. It cannot encode text."""

    eos_token_id = 0

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0
