"""Wan VACE: videos that follow a control video, such as edges, depth or a video in which a part is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.lora_layer_names import map_layers
from wfm_ds.models.vae import encode_normalized
from wfm_ds.models.wan import LORA_NAMES, Wan, map_block_layers
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import CONTROL, CONTROL_MASK, Conditioning


class WanVACE(Wan):
    """Wan 2.1 VACE. Additional blocks encode the control video, and their outputs are added to the Wan blocks.

    Reference images are not supported: the pipeline generates them as additional first frames of the video.
    """

    family = "wan_vace"
    pipeline_classes = ("WanVACEPipeline",)
    optional_conditioning_keys = frozenset({CONTROL})
    input_specs: ClassVar[Mapping[str, InputSpec]] = MappingProxyType(
        {
            CONTROL: InputSpec(rank=4, required=True),
            CONTROL_MASK: InputSpec(rank=4, requires_input=CONTROL),
        }
    )
    lora_layer_names = (
        *LORA_NAMES,
        *map_block_layers("vace_blocks.{}"),
        *map_layers("vace_blocks.{}", "vace_blocks.{}", {"proj_in": "before_proj", "proj_out": "after_proj"}),
    )
    block_classes = (WanTransformerBlock, WanVACETransformerBlock)

    def __init__(self, pipeline: Any, path: Path, **options: Any) -> None:
        """Raise ModelError if the pipeline is not supported."""
        super().__init__(pipeline, path, **options)
        expected = 2 * pipeline.vae.config.z_dim + pipeline.vae_scale_factor_spatial**2
        if self.config.vace_in_channels != expected:
            raise ModelError(
                f"{path}: a network with {self.config.vace_in_channels} control channels is not supported, only "
                f"{expected}; use a WanVACEPipeline of Wan 2.1"
            )

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[Any]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Return {control: [batch, channels, T, h, w] float32} for the inputs of each sample.

        The channels are the latents of the kept pixels, the latents of the pixels to generate, and the mask. Without
        control_mask, all pixels are generated. Results are cached in host memory. Raises ValueError if `control` is
        missing, or if a video has the wrong shape.
        """
        samples = [find_videos(sample, num_frames, size) for sample in inputs]
        rows = [self.image_cache.encode(videos, None, partial(self._encode_videos, *videos)) for videos in samples]
        return {CONTROL: copy_to_device(torch.cat([row[CONTROL] for row in rows]), self.device)}

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {CONTROL: (self.config.vace_in_channels, *shape[1:])}

    def network_inputs(self, conditioning: Conditioning) -> dict[str, Tensor]:
        return {"control_hidden_states": conditioning[CONTROL].to(self.dtype)}

    @torch.no_grad()
    def _encode_videos(
        self, control: npt.NDArray[np.uint8], control_mask: npt.NDArray[np.uint8] | None = None
    ) -> Conditioning:
        """Encode a control video [F,H,W,3] and its mask, if it has one, as the pipeline does."""
        pixels = 2 * self._copy_video(control) - 1
        if control_mask is None:  # all pixels are generated
            mask = torch.ones_like(pixels)
            latents = [self._encode_grey(pixels), encode_normalized(self.pipeline.vae, pixels)]
        else:
            mask = self._copy_video(control_mask)
            is_generated = (mask > 0.5).float()
            parts = (pixels * (1 - is_generated), pixels * is_generated)
            latents = [encode_normalized(self.pipeline.vae, part) for part in parts]
        return {CONTROL: torch.cat([*latents, self._fold_mask(mask[0, 0], latents[0].shape[2])], dim=1)}

    def _copy_video(self, video: npt.NDArray[np.uint8]) -> Tensor:
        """Return a video [F,H,W,3] on the model's device: [1,3,F,H,W] in [0, 1]."""
        return copy_to_device(torch.from_numpy(video), self.device).permute(3, 0, 1, 2)[None].float() / 255

    def _encode_grey(self, pixels: Tensor) -> Tensor:
        """Return the latents of a grey video in the size of `pixels`, from the cache if possible."""

        def encode() -> Conditioning:
            return {CONTROL: encode_normalized(self.pipeline.vae, torch.zeros_like(pixels))}

        return copy_to_device(self.image_cache.encode([], pixels.shape, encode)[CONTROL], self.device)

    def _fold_mask(self, mask: Tensor, num_latents: int) -> Tensor:
        """Return a mask [F,H,W] in the size of the latents: [1, pixels per latent, num_latents, h, w]."""
        folded = torch.pixel_unshuffle(mask[:, None], self.pipeline.vae_scale_factor_spatial).movedim(1, 0)[None]
        size = (num_latents, *folded.shape[3:])
        return torch.nn.functional.interpolate(folded, size=size, mode="nearest-exact")


def find_videos(
    sample: Mapping[str, npt.NDArray[Any]], num_frames: int, size: tuple[int, int]
) -> list[npt.NDArray[np.uint8]]:
    """Return the control video [F,H,W,3] and, if the sample has one, its mask.

    Raises ValueError if `control` is missing, or if a video has the wrong shape.
    """
    if CONTROL not in sample:
        raise ValueError(f"{CONTROL} is missing")
    videos, shape = {name: sample[name] for name in (CONTROL, CONTROL_MASK) if name in sample}, (num_frames, *size, 3)
    for name, video in videos.items():
        if video.shape != shape or video.dtype != np.uint8:
            raise ValueError(f"{name} must be uint8 {list(shape)}, got {video.dtype} {list(video.shape)}")
    return list(videos.values())
