"""Forward functions of diffusers' transformer blocks with fused modulations and gates, for fused_norms.py.

A function must call each module that owns parameters, so that ZeRO-3 gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Modulation,
    Flux2SingleTransformerBlock,
    Flux2TransformerBlock,
)
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformerBlock
from diffusers.models.transformers.transformer_sana_wm import SanaVideoMSCamCtrlBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import Tensor, nn

from wfm_kernels import adaptive_layer_norm, gate_residual

Forward: TypeAlias = Callable[..., Any]
MAX_FLOAT16 = 65504.0  # some blocks clip float16


def modulate(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return norm(x) * (1 + scale) + shift for a LayerNorm without weight. scale, shift: [B, n] or [B, tokens, n]."""
    scale, shift = (m if m.ndim == 3 else m.unsqueeze(1) for m in (scale, shift))
    return adaptive_layer_norm(x, scale, shift, eps=norm.eps)


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return gate_residual(x, y, gate if gate.ndim == 3 else gate.unsqueeze(1))


def add_mlp(x: Tensor, norm: nn.Module, mlp: nn.Module, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    return add_gated(x, mlp(modulate(norm, x, scale, shift)), gate)


def clip_float16(x: Tensor) -> Tensor:
    return x.clip(-MAX_FLOAT16, MAX_FLOAT16) if x.dtype == torch.float16 else x


def forward_sd3_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    options = joint_attention_kwargs or {}
    image, gate, shift_mlp, scale_mlp, gate_mlp, *second = block.norm1(hidden_states, emb=temb)
    if block.context_pre_only:
        text = block.norm1_context(encoder_hidden_states, temb)
    else:
        text, *text_modulation = block.norm1_context(encoder_hidden_states, emb=temb)
    attended, attended_text = block.attn(hidden_states=image, encoder_hidden_states=text, **options)
    hidden_states = add_gated(hidden_states, attended, gate)
    if block.use_dual_attention:
        image, gate = second
        hidden_states = add_gated(hidden_states, block.attn2(hidden_states=image, **options), gate)
    hidden_states = add_mlp(hidden_states, block.norm2, block.ff, shift_mlp, scale_mlp, gate_mlp)
    if block.context_pre_only:
        return None, hidden_states
    gate, *text_mlp = text_modulation
    text = add_gated(encoder_hidden_states, attended_text, gate)
    return add_mlp(text, block.norm2_context, block.ff_context, *text_mlp), hidden_states


def forward_wan_block(
    block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
) -> Tensor:
    """temb: [B, 6, n], or [B, tokens, 6, n] for one time per token."""
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (block.scale_shift_table + temb.float()).unbind(dim=-2)
    attended = block.attn1(modulate(block.norm1, hidden_states, scale, shift), None, None, rotary_emb)
    hidden_states = add_gated(hidden_states, attended, gate)
    hidden_states = hidden_states + block.attn2(block.norm2(hidden_states), encoder_hidden_states, None, None)
    return add_mlp(hidden_states, block.norm3, block.ffn, shift_mlp, scale_mlp, gate_mlp)


def forward_vace_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    control_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
) -> tuple[Tensor | None, Tensor]:
    if block.proj_in is not None:
        control_hidden_states = block.proj_in(control_hidden_states) + hidden_states
    control = forward_wan_block(block, control_hidden_states, encoder_hidden_states, temb, rotary_emb)
    return None if block.proj_out is None else block.proj_out(control), control


def forward_flux_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    image, gate, *image_mlp = block.norm1(hidden_states, emb=temb)
    text, text_gate, *text_mlp = block.norm1_context(encoder_hidden_states, emb=temb)
    attended, attended_text = block.attn(
        hidden_states=image,
        encoder_hidden_states=text,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = add_gated(hidden_states, attended, gate)
    text = add_gated(encoder_hidden_states, attended_text, text_gate)
    text = add_mlp(text, block.norm2_context, block.ff_context, *text_mlp)
    return clip_float16(text), add_mlp(image, block.norm2, block.ff, *image_mlp)


def forward_flux_single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    normed, gate = block.norm(tokens, emb=temb)
    mlp = block.act_mlp(block.proj_mlp(normed))
    options = joint_attention_kwargs or {}
    attended = block.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **options)
    tokens = clip_float16(add_gated(tokens, block.proj_out(torch.cat([attended, mlp], dim=2)), gate))
    length = encoder_hidden_states.shape[1]
    return tokens[:, :length], tokens[:, length:]


def forward_flux2_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    (shift, scale, gate), image_mlp = Flux2Modulation.split(temb_mod_img, 2)
    (text_shift, text_scale, text_gate), text_mlp = Flux2Modulation.split(temb_mod_txt, 2)
    attended, attended_text = block.attn(
        hidden_states=modulate(block.norm1, hidden_states, scale, shift),
        encoder_hidden_states=modulate(block.norm1_context, encoder_hidden_states, text_scale, text_shift),
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = add_gated(hidden_states, attended, gate)
    text = add_gated(encoder_hidden_states, attended_text, text_gate)
    text = add_mlp(text, block.norm2_context, block.ff_context, *text_mlp)
    return clip_float16(text), add_mlp(image, block.norm2, block.ff, *image_mlp)


def forward_flux2_single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    """Without encoder_hidden_states, hidden_states contain the tokens of the text."""
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    ((shift, scale, gate),) = Flux2Modulation.split(temb_mod, 1)
    attended = block.attn(
        hidden_states=modulate(block.norm, hidden_states, scale, shift),
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    hidden_states = clip_float16(add_gated(hidden_states, attended, gate))
    return (hidden_states[:, :text_seq_len], hidden_states[:, text_seq_len:]) if split_hidden_states else hidden_states


def forward_hunyuan_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
) -> tuple[Tensor, Tensor]:
    image, gate, *image_mlp = block.norm1(hidden_states, emb=temb)
    text, text_gate, *text_mlp = block.norm1_context(encoder_hidden_states, emb=temb)
    attended, attended_text = block.attn(
        hidden_states=image, encoder_hidden_states=text, attention_mask=attention_mask, image_rotary_emb=freqs_cis
    )
    image = add_gated(hidden_states, attended, gate)
    text = add_gated(encoder_hidden_states, attended_text, text_gate)
    image = add_mlp(image, block.norm2, block.ff, *image_mlp)
    return image, add_mlp(text, block.norm2_context, block.ff_context, *text_mlp)


def qwen_modulation(parameters: Tensor, index: Tensor | None) -> list[Tensor]:
    """Return shift, scale and gate, [B, 1, n] each.

    With index [B, tokens] of 0 and 1, each token selects one half of the batch of parameters: [B, tokens, n].
    """
    parts = [part.unsqueeze(1) for part in parameters.chunk(3, dim=-1)]
    if index is None:
        return parts
    first, halves = index.unsqueeze(-1) == 0, (part.chunk(2) for part in parts)
    return [torch.where(first, one, other) for one, other in halves]


def forward_qwen_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    first, second = block.img_mod(temb).chunk(2, dim=-1)
    text_first, text_second = block.txt_mod(temb.chunk(2)[0] if block.zero_cond_t else temb).chunk(2, dim=-1)
    shift, scale, gate = qwen_modulation(first, modulate_index)
    text_shift, text_scale, text_gate = qwen_modulation(text_first, None)
    attended, attended_text = block.attn(
        hidden_states=modulate(block.img_norm1, hidden_states, scale, shift),
        encoder_hidden_states=modulate(block.txt_norm1, encoder_hidden_states, text_scale, text_shift),
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = add_gated(hidden_states, attended, gate)
    text = add_gated(encoder_hidden_states, attended_text, text_gate)
    image = add_mlp(image, block.img_norm2, block.img_mlp, *qwen_modulation(second, modulate_index))
    text = add_mlp(text, block.txt_norm2, block.txt_mlp, *qwen_modulation(text_second, None))
    return clip_float16(text), clip_float16(image)


def forward_cosmos_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
    image_rotary_emb: Any = None,
    extra_pos_emb: Tensor | None = None,
    attention_mask: Tensor | None = None,
    controlnet_residual: None = None,
    latents: None = None,
    block_idx: int | None = None,
) -> Tensor:
    """A block of a model without control networks."""
    x = hidden_states if extra_pos_emb is None else hidden_states + extra_pos_emb
    normed, gate = block.norm1(x, embedded_timestep, temb)
    x = add_gated(x, block.attn1(normed, image_rotary_emb=image_rotary_emb), gate)
    normed, gate = block.norm2(x, embedded_timestep, temb)
    text = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}
    x = add_gated(x, block.attn2(normed, **text), gate)
    normed, gate = block.norm3(x, embedded_timestep, temb)
    return add_gated(x, block.ff(normed), gate)


def forward_sana_block(
    block: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Any = None,
    height: Any = None,
    width: Any = None,
) -> Tensor:
    modulation = block.scale_shift_table[None] + timestep.reshape(len(hidden_states), 6, -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)
    x = add_gated(hidden_states, block.attn1(modulate(block.norm1, hidden_states, scale, shift)), gate)
    x = block.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask) + x
    rows = modulate(block.norm2, x, scale_mlp, shift_mlp)
    image = rows.reshape(len(x), height, width, -1).permute(0, 3, 1, 2)
    return add_gated(x, block.ff(image).flatten(2, 3).permute(0, 2, 1), gate_mlp)


def forward_sana_video_block(
    block: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Any = None,
    frames: Any = None,
    height: Any = None,
    width: Any = None,
    rotary_emb: Any = None,
) -> Tensor:
    """timestep: [B, 1 or tokens, 6 n]."""
    modulation = block.scale_shift_table[None, None] + timestep.reshape(*timestep.shape[:2], 6, -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation.unbind(dim=2)
    normed = modulate(block.norm1, hidden_states, scale, shift)
    x = add_gated(hidden_states, block.attn1(normed, rotary_emb=rotary_emb), gate)
    x = block.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask) + x
    video = modulate(block.norm2, x, scale_mlp, shift_mlp).reshape(len(x), frames, height, width, -1)
    return add_gated(x, block.ff(video).flatten(1, 3), gate_mlp)


def forward_sana_wm_block(
    block: Any,
    x: Tensor,
    y: Tensor,
    t: Tensor,
    mask: Any = None,
    THW: Any = None,
    rotary_emb: Any = None,
    block_mask: Any = None,
    camera_conditions: Any = None,
    ucpe_ray_transforms: Any = None,
    plucker_emb: Tensor | None = None,
    frame_valid_mask: None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """t: [B, 1, frames, 6 n]. The modulation of a frame is the same for all its tokens. All frames are valid."""
    num_frames = t.shape[2]

    def by_frame(rows: Tensor) -> Tensor:
        return rows.reshape(len(x) * num_frames, -1, x.shape[-1])

    modulation = block.scale_shift_table[None, None] + t.reshape(len(x), num_frames, 6, -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (by_frame(part) for part in modulation.unbind(dim=2))
    normed = modulate(block.norm1, by_frame(x), scale, shift).view_as(x)
    attended = block.attn(
        normed,
        HW=THW,
        rotary_emb=rotary_emb,
        block_mask=block_mask,
        camera_conditions=camera_conditions,
        chunk_size=block.chunk_size if chunk_size is None else chunk_size,
        frame_valid_mask=frame_valid_mask,
        ucpe_ray_transforms=ucpe_ray_transforms,
    )
    x = add_gated(by_frame(x), by_frame(attended), gate).view_as(x)
    if plucker_emb is not None and hasattr(block, "plucker_proj"):
        x = x + block.plucker_proj(plucker_emb)
    x = x + block.cross_attn(x, y, mask=mask)
    normed = modulate(block.norm2, by_frame(x), scale_mlp, shift_mlp).view_as(x)
    return add_gated(by_frame(x), by_frame(block.mlp(normed, HW=THW)), gate_mlp).view_as(x)


def forward_z_image_block(
    block: Any, x: Tensor, attn_mask: Tensor | None, freqs_cis: Tensor, adaln_input: Tensor
) -> Tensor:
    """A block with one modulation for all tokens, called by BatchedZImage."""
    scale, gate, scale_mlp, gate_mlp = block.adaLN_modulation(adaln_input).unsqueeze(1).chunk(4, dim=2)
    attended = block.attention(block.attention_norm1(x) * (1.0 + scale), attention_mask=attn_mask, freqs_cis=freqs_cis)
    x = add_gated(x, block.attention_norm2(attended), gate.tanh())
    y = block.feed_forward(block.ffn_norm1(x) * (1.0 + scale_mlp))
    return add_gated(x, block.ffn_norm2(y), gate_mlp.tanh())


BLOCK_FORWARDS: Mapping[type[nn.Module], Forward] = {
    JointTransformerBlock: forward_sd3_block,
    WanTransformerBlock: forward_wan_block,
    WanVACETransformerBlock: forward_vace_block,
    ZImageTransformerBlock: forward_z_image_block,
    CosmosTransformerBlock: forward_cosmos_block,
    FluxTransformerBlock: forward_flux_block,
    FluxSingleTransformerBlock: forward_flux_single_block,
    Flux2TransformerBlock: forward_flux2_block,
    Flux2SingleTransformerBlock: forward_flux2_single_block,
    HunyuanVideo15TransformerBlock: forward_hunyuan_block,
    QwenImageTransformerBlock: forward_qwen_block,
    SanaTransformerBlock: forward_sana_block,
    SanaVideoTransformerBlock: forward_sana_video_block,
    SanaVideoMSCamCtrlBlock: forward_sana_wm_block,
}
"""{block class of diffusers: the function that replaces its forward}. Its first argument is the block."""
