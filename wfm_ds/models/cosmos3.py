"""Cosmos3 (Edge, Nano, Super): text, image and video to world, and videos that follow actions (forward dynamics).

Of the network only the tower that denoises is sampled from and trained; the one that reads the text is this family's
text encoder (cosmos3_towers.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import _SYSTEM_PROMPT_IMAGE, _SYSTEM_PROMPT_VIDEO
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models import guardrail
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditional_frames import frames_in
from wfm_ds.models.cosmos3_towers import OF_TEXT, GenerationLayer, TextTower, split
from wfm_ds.models.guardrail import Guardrail
from wfm_ds.models.inputs import Input
from wfm_ds.ulysses.cosmos3 import grid_of

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

TEXT_KEYS = ("text_keys", "text_values", "text_mask")
EXPECTED_TOKENS = 512  # of a text, to reckon with before there is one; the pipeline cuts none
UNUSED = ("audio_*", "action_proj_out.*")  # heads of what nothing here predicts
OF_ACTIONS = ("action_*",)
SYSTEM = {True: _SYSTEM_PROMPT_IMAGE, False: _SYSTEM_PROMPT_VIDEO}  # by: it is an image


class Cosmos3(DiffusionModel):
    """The network's time is 1000 sigma, its output the velocity. A caption states the size and the duration."""

    family = "cosmos3"
    pipeline_classes = ("Cosmos3OmniPipeline",)
    required_parts = ("transformer", "vae", "scheduler", "text_tokenizer")
    conditioning_keys = frozenset(TEXT_KEYS)
    optional_keys = frozenset({"actions", "domain"})
    takes: ClassVar[Mapping[str, Input]] = MappingProxyType(
        {"actions": Input(rank=2), "domain": Input(rank=0, beside="actions")}
    )
    default_lora_targets = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    block_classes = (GenerationLayer,)
    video = True
    conditional_frames = (0, 1, 2)
    has_guardrail = True

    def __init__(self, pipeline: Any, path: Path, *, max_sequence_length: int | None = None, **options: Any) -> None:
        """Take the network apart. ModelError for a max_sequence_length: the pipeline reads prompts whole."""
        if max_sequence_length is not None:
            raise ModelError(f"{path}: Cosmos3 reads prompts whole; remove model.max_sequence_length")
        super().__init__(pipeline, path, max_sequence_length=EXPECTED_TOKENS, **options)
        tower: Any = self.bare_denoiser
        tower.fps, tower.temporal_compression = self.fps, self.pipeline.vae_scale_factor_temporal

    @classmethod
    def extra_parts(cls, folder: Path, setting: Guardrail) -> dict[str, Any]:
        return {"safety_checker": guardrail.checker(setting, folder), "enable_safety_checker": True}

    @classmethod
    def placeholders(cls) -> dict[str, Any]:
        return {"text_tokenizer": NoTokenizer()}

    def take_denoiser(self, pipeline: Any) -> nn.Module:
        text, tower = split(pipeline.transformer)
        self.text_tower: TextTower | None = text.to(self.dtype)
        pipeline.transformer = tower
        pipeline.sound_tokenizer = None  # nothing here has sound
        return tower

    def frozen_parts(self) -> list[nn.Module]:
        return [*super().frozen_parts(), *self.text_parts().values()]

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*OF_TEXT, *UNUSED, *(() if "actions" in self.inputs else OF_ACTIONS))

    def text_parts(self) -> dict[str, nn.Module]:
        return {} if self.text_tower is None else {"text_tower": self.text_tower}

    def text_folders(self) -> list[str]:
        return ["transformer", "text_tokenizer"]

    def drop_text_encoders(self) -> None:
        self.text_tower = None

    @property
    def text_dtype(self) -> torch.dtype:
        return self.dtype

    def check_prompts(self, prompts: Sequence[str]) -> None:
        guardrail.refuse_unsafe(self.pipeline.safety_checker, prompts)

    def caption(self, text: str, height: int, width: int, num_frames: int, *, negative: bool = False) -> str:
        """The system's sentence on a line of its own, then the text and what it is to be: its size and duration, in a
        negative text what it is not to be. With actions both are keys of a JSON object, and negative texts bare.

        A text that is a JSON object already stays as it is: it may say from where an action is seen, which is else
        taken to be the agent's own view."""
        is_image = num_frames == 1
        if "actions" not in self.inputs:
            text = self.with_sentences(text, height, width, num_frames, negative)
        elif not negative and not text.lstrip().startswith("{"):
            text = self.pipeline._build_action_json_prompt(
                text, view_point="ego_view", num_frames=num_frames, fps=self.fps, height=height, width=width
            )
        return f"{SYSTEM[is_image]}\n{text}" if self.pipeline.config.default_use_system_prompt else text

    def with_sentences(self, text: str, height: int, width: int, num_frames: int, negative: bool) -> str:
        """The text, then what the pipeline says of duration and size in its own words."""
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
        """text_keys, text_values [B,L,G,K,D] and text_mask [B,L]: what each layer of the text tower has of these
        captions, shorter ones with zeros behind them. ValueError for no prompts."""
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one text, got {prompts!r}")
        assert self.text_tower is not None, "the text tower was dropped"
        rows = []
        for prompt in prompts:
            ids = torch.tensor(self.token_ids(prompt), device=self.device)
            keys, values = self.text_tower(ids)
            rows.append(dict(zip(TEXT_KEYS, (keys[None], values[None], torch.ones_like(ids)[None]), strict=True)))
        return self.stack(rows)

    def token_ids(self, caption: str) -> list[int]:
        """The ids of a conversation that ends where the video begins."""
        head, newline, rest = caption.partition("\n")
        turns = [{"role": "user", "content": caption}]
        if newline and head in SYSTEM.values():
            turns = [{"role": "system", "content": head}, {"role": "user", "content": rest}]
        encoded = self.pipeline.text_tokenizer.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=True, add_vision_id=False, return_dict=True
        )
        ends = self.pipeline.llm_special_tokens
        return [*encoded.input_ids, ends["eos_token_id"], ends["start_of_generation"]]

    @staticmethod
    def stack(rows: Sequence[Conditioning]) -> Conditioning:
        """Join rows, texts padded to the longest with zeros that text_mask hides."""
        longest = max(row["text_mask"].shape[1] for row in rows)

        def padded(name: str, tensor: Tensor) -> Tensor:
            behind = longest - tensor.shape[1] if name in TEXT_KEYS else 0
            return nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, behind)) if behind else tensor

        return {name: torch.cat([padded(name, row[name]) for row in rows]) for name in rows[0]}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config, length = self.config, self.max_sequence_length
        cached = (length, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        return {"text_keys": cached, "text_values": cached, "text_mask": (length,)}

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """actions [B,F-1,A] float32, zeros behind the channels that a sample has, and domain [B] int64, by which the
        network picks the weights for them (0 where none is told). Nothing of samples without actions.

        ValueError for a network that takes no actions, for actions of another length or of more channels than it has,
        for samples of which only some have actions, and for a domain that there is not.
        """
        if not any("actions" in row for row in inputs):
            return {}
        if not self.config.action_gen:
            raise ValueError(f"{self.path}: this network takes no actions (action_gen is off)")
        if not all("actions" in row for row in inputs):
            raise ValueError("of the samples of a batch either all have actions or none")
        width, domains = self.config.action_dim, self.config.num_embodiment_domains
        actions = torch.zeros(len(inputs), num_frames - 1, width)
        for row, told in zip(actions, inputs, strict=True):
            array = told["actions"]
            if array.ndim != 2 or len(array) != num_frames - 1 or not 0 < array.shape[1] <= width:
                raise ValueError(f"actions must be [{num_frames - 1}, 1 to {width}], got {list(array.shape)}")
            row[:, : array.shape[1]] = torch.from_numpy(np.asarray(array, np.float32))
        numbers = [float(row.get("domain", 0)) for row in inputs]
        if not all(number.is_integer() and 0 <= number < domains for number in numbers):
            raise ValueError(f"the domain must be a whole number from 0 to {domains - 1}, got {numbers}")
        domain = torch.tensor([int(number) for number in numbers])
        return {"actions": actions.to(self.device), "domain": domain.to(self.device)}

    def decode(self, latents: Tensor) -> Tensor:
        """Decode as every family does; then apply the guardrail's post-processing, as in the stock pipeline."""
        return guardrail.guarded(self.pipeline.safety_checker, super().decode(latents))

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning)
        if latents.ndim != 5 or expert not in (None, 0):
            raise ValueError(
                f"cosmos3 takes latents [B,C,T,h,w] and has one expert, got {list(latents.shape)}, expert {expert}"
            )
        given = frames_in(conditioning)
        free = latents.new_ones(len(latents), latents.shape[2]) if given is None else 1 - given.mask.flatten(1)
        velocity: Tensor = self.denoiser(
            latents=(latents if given is None else given.enter(latents)).to(self.dtype),
            time=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            free=free,
            **{name: conditioning[name] for name in TEXT_KEYS},
            **{name: conditioning[name] for name in sorted(self.optional_keys & conditioning.keys())},
        )[0].float()
        return velocity if given is None else given.leave(velocity, latents, sigma)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """(C, (F - 1) / 4 + 1, H / f, W / f). Patches may overhang: the VAE alone limits the multiple."""
        factor, frames_factor = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        num_latent_frames, rest = divmod(num_frames - 1, frames_factor)
        if rest or num_frames < 1:
            raise ValueError(f"num_frames must be {frames_factor} * k + 1, at least 1, got {num_frames}")
        for name, size in (("height", height), ("width", width)):
            if size < 1 or size % factor:
                raise ValueError(f"{name} must be a multiple of {factor}, at least {factor}, got {size}")
        return (self.config.latent_channel, num_latent_frames + 1, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return math.prod(grid_of(self.config, shape[1:]))

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        """Return the grid of pipelines that ask for their own (use_native_flow_schedule)."""
        if not self.pipeline.config.use_native_flow_schedule:
            return {}
        first = 1 - 1 / self.pipeline.scheduler.config.num_train_timesteps
        return {"sigmas": np.linspace(first, 0.0, num_steps + 1)[:-1]}

    def text_call(self) -> dict[str, Any]:
        return {}

    def pipeline_call(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        call = super().pipeline_call(w, height, width, num_frames)
        return {**call, "num_frames": num_frames, "fps": self.fps}


class NoTokenizer:
    """Stand-in that answers what the pipeline's constructor asks of a tokenizer; it encodes nothing."""

    eos_token_id = 0

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0
