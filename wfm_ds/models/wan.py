"""Wan 2.1, Wan 2.2 A14B (two experts) and Wan 2.2 TI2V 5B (a time for each token): videos, UMT5 text, the Wan VAE. The
first two from text or, other networks, from an image (wan_images.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftfy  # noqa: F401, the pipeline cleans prompts with it, and without a word does not where it is missing
import numpy as np
import numpy.typing as npt
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditional_frames import frames_in
from wfm_ds.models.experts import Experts
from wfm_ds.models.loading import read_json
from wfm_ds.models.lora_names import renamed
from wfm_ds.models.wan_images import CHANNELS, EMBEDS, ImageConditions
from wfm_ds.types import FIRST_FRAME

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

EXPERTS = ("transformer", "transformer_2")  # more noise first

LORA_NAMES = tuple(
    name
    for own, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
    for name in renamed(
        f"blocks.{{}}.{own}", f"blocks.{{}}.{theirs}", {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
    )
) + renamed("blocks.{}", "blocks.{}", {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"})
OF_IMAGES = ("add_k_proj", "add_v_proj")  # layers of the attention to CLIP's embeddings
LORA_NAMES += renamed("blocks.{}.attn2", "blocks.{}.cross_attn", {"add_k_proj": "k_img", "add_v_proj": "v_img"})
TEXT_TOKENS = 512  # that diffusers takes the last tokens of image and text to be


class Wan(DiffusionModel):
    """The network's time is num_train_timesteps * sigma as a float, its output the velocity.

    What tells the variants apart is in model_index.json: `boundary_ratio` splits the noise levels between two experts
    (2.2 A14B), `expand_timesteps` is TI2V, whose first frame may be given. Networks with more input channels than
    latents make all videos from a first frame, of which they are told and denoise each.
    """

    family = "wan"
    pipeline_classes = ("WanPipeline", "WanImageToVideoPipeline")
    required_parts = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({"prompt_embeds"})
    default_lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    lora_names = LORA_NAMES
    block_classes = (WanTransformerBlock,)
    denoiser_parts: tuple[str, ...] = EXPERTS
    video = True

    def __init__(self, pipeline: Any, path: Path, **options: Any) -> None:
        """Raises ModelError, besides what take_denoiser does, for a length of texts that diffusers has no way to tell
        from an image's."""
        super().__init__(pipeline, path, **options)
        if self.images is not None and self.images.embeds and self.max_sequence_length != TEXT_TOKENS:
            raise ModelError(
                f"{path}: beside an image the network takes texts of {TEXT_TOKENS} tokens; remove "
                f"model.max_sequence_length, which is {self.max_sequence_length}"
            )

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        index = read_json(folder / "model_index.json")
        absent = [name for name in ("image_encoder", "image_processor") if not any(index.get(name) or [])]
        if len(absent) == 1:
            raise ModelError(f"{folder} has no {absent[0]}, which sees the first frame; use a whole pipeline")

    def take_denoiser(self, pipeline: Any) -> nn.Module:
        """Raises ModelError for half a pair of experts, and for networks that take other channels than latents or an
        image beside them, or two images."""
        self.boundary: float | None = pipeline.config.get("boundary_ratio")
        self.time_per_token = bool(pipeline.config.get("expand_timesteps"))
        networks = {name: part for name in EXPERTS if (part := getattr(pipeline, name, None)) is not None}
        if (len(networks) == 2) != (self.boundary is not None):
            raise ModelError(
                f"{self.path}: transformer_2 and boundary_ratio belong together, its model_index.json has one of them; "
                "use a whole pipeline"
            )
        self.denoiser_parts = tuple(networks)
        self.images = self.image_conditions(pipeline, [network.config for network in networks.values()])
        if self.images is not None:
            self.conditional_frames, self.pins_frames = (1,), False
            self.optional_keys = frozenset(self.images.keys)
            if self.images.embeds:
                self.default_lora_targets = (*self.default_lora_targets, *OF_IMAGES)
        elif self.time_per_token:
            self.conditional_frames = (0, 1)
        return networks["transformer"] if self.boundary is None else Experts(networks)

    @classmethod
    def needs_first_frame(cls, folder: Path) -> bool:
        config = read_json(folder / "transformer" / "config.json")
        return bool(config["in_channels"] > config["out_channels"])

    def image_conditions(self, pipeline: Any, configs: Sequence[Any]) -> ImageConditions | None:
        """Return what tells these networks a first frame; None if they take latents alone."""
        latents = pipeline.vae.config.z_dim
        with_image = (
            2 * latents + pipeline.vae_scale_factor_temporal
        )  # a mask for each pixel frame, and the image's own
        config, *others = configs
        channels, embeds = config.in_channels, config.image_dim is not None
        if any((other.in_channels, other.image_dim) != (channels, config.image_dim) for other in others):
            raise ModelError(f"{self.path}: its two experts do not take the same inputs; use a whole pipeline")
        if channels not in (latents, with_image) or (embeds and channels == latents):
            raise ModelError(
                f"{self.path}: a network of {channels} input channels is not supported, of which {latents} are latents "
                f"and {with_image} latents and an image; use a text-to-video, TI2V or image-to-video pipeline"
            )
        if channels == latents:
            return None
        if config.pos_embed_seq_len is not None:
            raise ModelError(
                f"{self.path}: networks that are told the first and the last frame are not supported, samples have no "
                "last one to tell; use the image-to-video pipeline"
            )
        if not hasattr(pipeline, "encode_image") or (embeds and pipeline.image_encoder is None):
            raise ModelError(
                f"{self.path}: the network takes an image, for which its pipeline has no parts; use a whole pipeline "
                "of class WanImageToVideoPipeline"
            )
        return ImageConditions(pipeline, embeds=embeds)

    @property
    def sigma_ranges(self) -> tuple[tuple[float, float], ...]:
        """`transformer` denoises from boundary_ratio up, `transformer_2` below."""
        return super().sigma_ranges if self.boundary is None else ((self.boundary, 1.0), (0.0, self.boundary))

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [B, max_sequence_length, text_dim]; rows past the prompt are 0. ValueError for no prompts."""
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one text, got {prompts!r}")
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self.max_sequence_length, self.config.text_dim)}

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Encode first frames (ImageConditions). ValueError where a sample has none, or one of another size."""
        if self.images is None:
            return {}
        frames = [row[FIRST_FRAME] for row in inputs if FIRST_FRAME in row]
        if len(frames) < len(inputs):
            raise ValueError(f"{len(inputs) - len(frames)} of {len(inputs)} samples have no first frame")
        if wrong := [list(frame.shape) for frame in frames if frame.shape != (*size, 3)]:
            raise ValueError(f"a first frame must be {[*size, 3]}, got {wrong[0]}")
        return self.images.of([frame.astype(np.uint8) for frame in frames], num_frames, self.device)

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {} if self.images is None else self.images.shapes(shape)

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        """Denoise as the base says. With two experts, all of sigma must belong to one; it is read from the device if
        `expert` is not given."""
        self.check_denoise(latents, sigma, conditioning)
        if latents.ndim != 5:
            raise ValueError(f"wan takes latents [B,C,T,h,w], got {list(latents.shape)}")
        if lacking := sorted(self.optional_keys - conditioning.keys()):
            raise ValueError(f"the network makes videos from a first frame: conditioning must hold {lacking} too")
        expert = self.checked_expert(sigma, expert)
        frames = frames_in(conditioning)
        visible = latents if frames is None else frames.enter(latents)
        if self.images is not None:
            visible = torch.cat([visible, conditioning[CHANNELS]], dim=1)
        velocity: Tensor = self.denoiser(
            hidden_states=visible.to(self.dtype),
            timestep=self.network_time(sigma, latents.shape, None if frames is None else frames.mask),
            encoder_hidden_states=conditioning["prompt_embeds"].to(self.dtype),
            return_dict=False,
            **({} if self.boundary is None else {"expert": expert}),
            **({"encoder_hidden_states_image": conditioning[EMBEDS].to(self.dtype)} if EMBEDS in conditioning else {}),
        )[0].float()
        return velocity if frames is None else frames.leave(velocity, latents, sigma)

    def checked_expert(self, sigma: Tensor, expert: int | None) -> int:
        """The expert of all of sigma; ValueError if they have several, or another one than `expert` (looked at on the
        CPU only, elsewhere it would wait for the device)."""
        count = len(self.sigma_ranges)
        if expert is not None and not 0 <= expert < count:
            raise ValueError(f"{self.path} has the experts 0 to {count - 1}, not {expert}")
        if count == 1 or (expert is not None and sigma.device.type != "cpu"):
            return expert or 0
        found = {self.expert_of(level) for level in sigma.tolist()}
        if found != {expert} and (expert is not None or len(found) > 1):
            raise ValueError(f"one call serves one expert: sigma {sigma.tolist()} are of the experts {sorted(found)}")
        return found.pop()

    def network_time(self, sigma: Tensor, shape: Sequence[int], conditional_mask: Tensor | None) -> Tensor:
        """[B] float32; one for each token, [B, tokens], where the model takes that: 0 on conditional frames."""
        time_B: Tensor = sigma * self.pipeline.scheduler.config.num_train_timesteps
        if not self.time_per_token:
            return time_B
        time_BT = time_B[:, None].expand(-1, shape[2])
        if conditional_mask is not None:
            time_BT = (1 - conditional_mask.view(len(sigma), -1)) * time_BT
        return time_BT.repeat_interleave(self.num_tokens(shape[1:]) // shape[2], dim=1)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """(C, (F-1)/4+1, H/f, W/f). Patches limit the multiple, the table of positions the size."""
        _, *patch = self.config.patch_size
        factor, factor_t = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        positions = self.config.rope_max_seq_len
        for name, size, side in (("height", height, patch[0]), ("width", width, patch[1])):
            multiple = factor * side
            if size % multiple or not 0 < size <= multiple * positions:
                raise ValueError(
                    f"{name} must be a multiple of {multiple}, from {multiple} to {multiple * positions}, got {size}"
                )
        most = factor_t * (positions - 1) + 1
        if (num_frames - 1) % factor_t or not 0 < num_frames <= most:
            raise ValueError(
                f"num_frames must be {factor_t} * k + 1 (1, {factor_t + 1}, {2 * factor_t + 1}, ...), at most {most}, "
                f"got {num_frames}"
            )
        return (self.pipeline.vae.config.z_dim, (num_frames - 1) // factor_t + 1, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        _, frames, h, w = shape
        patch_t, patch_h, patch_w = self.config.patch_size
        return int((frames // patch_t) * (h // patch_h) * (w // patch_w))

    def pipeline_call(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        return {**super().pipeline_call(w, height, width, num_frames), "num_frames": num_frames}
