"""Z-Image's network for batched tensors. It does not read tensor values, so it never waits for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor, nn
from torch.nn import functional

PATCH_SIZE = 2  # latents along each side of a token
PATCH_LAYERS = f"{PATCH_SIZE}-1"  # name of the layers for this patch size and one frame


class BatchedZImage(ZImageTransformer2DModel):  # type: ignore[misc]
    """The diffusers network with a `forward` for batched tensors instead of lists of samples.

    Learned padding tokens extend image tokens and text tokens to a multiple of 32 each. Positions of image tokens
    depend on the text length.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the network's output [B,C,h,w] for latents [B,C,h,w].

        timestep: [B], from 0 (noise) to 1 (clean). encoder_hidden_states: text embeddings [B, tokens, channels].
        encoder_attention_mask: [B, tokens] int64, 0 on the padding at the end of each text.
        """
        h, w = hidden_states.shape[2:]
        time = self.t_embedder(timestep * self.t_scale).type_as(hidden_states)
        text_length = encoder_attention_mask.sum(1)  # [B]
        padded_length = -(-text_length // SEQ_MULTI_OF) * SEQ_MULTI_OF
        image, image_rope = self._image_tokens(hidden_states, padded_length)
        for layer in self.noise_refiner:
            image = self._run_layer(layer, image, None, image_rope, time)
        text, text_rope = self._text_tokens(encoder_hidden_states, text_length)
        # A single text has only learned padding and needs no mask. With a mask, fast kernels could not be used.
        attended = None
        if len(text) > 1:
            attended = torch.arange(text.shape[1], device=text.device) < padded_length[:, None]
        for layer in self.context_refiner:
            text = self._run_layer(layer, text, attended, text_rope)
        tokens, rope = torch.cat([image, text], 1), torch.cat([image_rope, text_rope], 1)
        if attended is not None:
            attended = torch.cat([attended.new_ones(image.shape[:2]), attended], 1)
        for layer in self.layers:
            tokens = self._run_layer(layer, tokens, attended, rope, time)
        patches = self.all_final_layer[PATCH_LAYERS](tokens[:, : h // PATCH_SIZE * (w // PATCH_SIZE)], c=time)
        return (unpatchify(patches, h, w),)

    def _image_tokens(self, latents: Tensor, padded_length: Tensor) -> tuple[Tensor, Tensor]:
        """Return image tokens, including padding tokens, and their rotary embeddings, each [batch, tokens, channels].

        padded_length: [batch], number of text tokens including padding tokens.
        """
        count, _, h, w = latents.shape
        tokens = self.all_x_embedder[PATCH_LAYERS](patchify(latents))
        missing = -tokens.shape[1] % SEQ_MULTI_OF
        positions = (
            position_grid(h // PATCH_SIZE, w // PATCH_SIZE, latents.device).expand(count, -1, -1).clone()
        )  # [B,N,3]
        positions[..., 0] = padded_length[:, None] + 1
        positions = functional.pad(positions, (0, 0, 0, missing))  # padding tokens have position 0
        padding = self.x_pad_token.expand(count, missing, -1)
        return torch.cat([tokens, padding], 1), self._rotary_embeddings(positions)

    def _text_tokens(self, embeds: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return text tokens, including padding tokens, and their rotary embeddings, each [batch, tokens, channels].

        embeds: [batch, tokens, channels]. length: [batch], number of tokens without padding.
        """
        embeds = functional.pad(embeds, (0, 0, 0, -embeds.shape[1] % SEQ_MULTI_OF))
        index = torch.arange(embeds.shape[1], device=embeds.device)
        is_text = (index < length[:, None])[..., None]
        tokens = torch.where(is_text, self.cap_embedder(embeds), self.cap_pad_token)
        positions = functional.pad(index[:, None] + 1, (0, 2))  # [n,3]
        return tokens, self._rotary_embeddings(positions.expand(len(embeds), -1, -1))

    def _rotary_embeddings(self, positions: Tensor) -> Tensor:
        rotations: Tensor = self.rope_embedder(positions.flatten(0, 1))
        return rotations.view(*positions.shape[:2], -1)

    def _run_layer(self, layer: nn.Module, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            checkpointed: Tensor = self._gradient_checkpointing_func(layer, *arguments)
            return checkpointed
        output: Tensor = layer(*arguments)
        return output


def patchify(latents: Tensor) -> Tensor:
    """Convert latents [B,C,h,w] to 2 x 2 patches [B, h/2 * w/2, 4 C]. Values are ordered by row, column, channel."""
    count, channels, h, w = latents.shape
    patches = latents.reshape(count, channels, h // PATCH_SIZE, PATCH_SIZE, w // PATCH_SIZE, PATCH_SIZE)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, h: int, w: int) -> Tensor:
    rows = patches.reshape(len(patches), h // PATCH_SIZE, w // PATCH_SIZE, PATCH_SIZE, PATCH_SIZE, -1)
    return rows.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, h, w)


def position_grid(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return positions (0, row, column), int64 [rows * columns, 3]."""
    positions = torch.zeros(rows, columns, 3, dtype=torch.int64, device=device)
    positions[..., 1] = torch.arange(rows, device=device)[:, None]
    positions[..., 2] = torch.arange(columns, device=device)
    return positions.flatten(0, 1)
