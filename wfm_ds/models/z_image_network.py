"""Z-Image's network for a batch: tensors in and out, where diffusers' forward takes and gives lists of samples.

No number is read from the device, so nothing waits for it, and sizes can be reckoned without any values.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor, nn
from torch.nn import functional

PATCH = 2  # rows and columns of latents in a token
LAYERS = f"{PATCH}-1"  # the name of the layers for such patches of one frame


class BatchedZImage(ZImageTransformer2DModel):  # type: ignore[misc]
    """The stock network with another forward, and none of its own layers.

    A sequence is the picture's tokens, learned padding to a multiple of 32, the text's, the same padding. Positions of
    the picture begin behind the padded text, so they depend on its length.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """The network's output [B,C,h,w] of latents [B,C,h,w] at times [B] from 0 (noise) to 1, for texts [B,n,D] of
        which the mask [B,n], int64, says what is no padding: at the end of a row there may be some."""
        h, w = hidden_states.shape[2:]
        time = self.t_embedder(timestep * self.t_scale).type_as(hidden_states)
        text_length = encoder_attention_mask.sum(1)  # [B]
        padded_length = -(-text_length // SEQ_MULTI_OF) * SEQ_MULTI_OF
        image, image_rope = self._image_tokens(hidden_states, padded_length)
        for layer in self.noise_refiner:
            image = self._run(layer, image, None, image_rope, time)
        text, text_rope = self._text_tokens(encoder_hidden_states, text_length)
        attended = None  # a text alone has no padding but the learned one. A mask would keep the fast kernels away.
        if len(text) > 1:
            attended = torch.arange(text.shape[1], device=text.device) < padded_length[:, None]
        for layer in self.context_refiner:
            text = self._run(layer, text, attended, text_rope)
        tokens, rope = torch.cat([image, text], 1), torch.cat([image_rope, text_rope], 1)
        if attended is not None:
            attended = torch.cat([attended.new_ones(image.shape[:2]), attended], 1)
        for layer in self.layers:
            tokens = self._run(layer, tokens, attended, rope, time)
        patches = self.all_final_layer[LAYERS](tokens[:, : h // PATCH * (w // PATCH)], c=time)
        return (of_patches(patches, h, w),)

    def _image_tokens(self, latents: Tensor, padded_length: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B,N,D] of patches and padding, and their rotations [B,N,R]."""
        count, _, h, w = latents.shape
        tokens = self.all_x_embedder[LAYERS](to_patches(latents))
        missing = -tokens.shape[1] % SEQ_MULTI_OF
        place = grid(h // PATCH, w // PATCH, latents.device).expand(count, -1, -1).clone()  # [B,N,3]
        place[..., 0] = padded_length[:, None] + 1
        place = functional.pad(place, (0, 0, 0, missing))  # padding stands at 0
        padding = self.x_pad_token.expand(count, missing, -1)
        return torch.cat([tokens, padding], 1), self._rotations(place)

    def _text_tokens(self, embeds: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a text [B,n,D]: padding stands where more text would."""
        embeds = functional.pad(embeds, (0, 0, 0, -embeds.shape[1] % SEQ_MULTI_OF))
        number = torch.arange(embeds.shape[1], device=embeds.device)
        written = (number < length[:, None])[..., None]
        tokens = torch.where(written, self.cap_embedder(embeds), self.cap_pad_token)
        place = functional.pad(number[:, None] + 1, (0, 2))  # [n,3]
        return tokens, self._rotations(place.expand(len(embeds), -1, -1))

    def _rotations(self, place: Tensor) -> Tensor:
        rotations: Tensor = self.rope_embedder(place.flatten(0, 1))
        return rotations.view(*place.shape[:2], -1)

    def _run(self, layer: nn.Module, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            recomputed: Tensor = self._gradient_checkpointing_func(layer, *arguments)
            return recomputed
        output: Tensor = layer(*arguments)
        return output


def to_patches(latents: Tensor) -> Tensor:
    """Patches [B, h/2 w/2, 4 C] of latents [B,C,h,w], in the order (row, column, channel)."""
    count, channels, h, w = latents.shape
    patches = latents.reshape(count, channels, h // PATCH, PATCH, w // PATCH, PATCH)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def of_patches(patches: Tensor, h: int, w: int) -> Tensor:
    """Latents [B,C,h,w] of their patches."""
    rows = patches.reshape(len(patches), h // PATCH, w // PATCH, PATCH, PATCH, -1)
    return rows.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, h, w)


def grid(rows: int, columns: int, device: torch.device) -> Tensor:
    """Positions [rows columns, 3] (0, row, column), int64, made on the device."""
    place = torch.zeros(rows, columns, 3, dtype=torch.int64, device=device)
    place[..., 1] = torch.arange(rows, device=device)[:, None]
    place[..., 2] = torch.arange(columns, device=device)
    return place.flatten(0, 1)
