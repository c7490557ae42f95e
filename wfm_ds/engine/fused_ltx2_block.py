"""Forward function of LTX-2's blocks with fused modulations and gates, for fused_norms.py.

It must call each module that owns parameters, so that ZeRO-3 gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wfm_ds.engine.fused_blocks import add_gated
from wfm_kernels import adaptive_rms_norm


def modulate_rms(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return norm(x) * (1 + scale) + shift for an RMSNorm without weight. scale, shift: [B, 1 or tokens, n]."""
    return adaptive_rms_norm(x, scale, shift, eps=norm.eps)


def attend_self(x: Tensor, norm: Any, attention: Any, modulation: Sequence[Tensor], **options: Any) -> Tensor:
    shift, scale, gate = modulation[:3]
    normed = modulate_rms(norm, x, scale, shift)
    return add_gated(x, attention(hidden_states=normed, encoder_hidden_states=None, **options), gate)


def attend_text(
    x: Tensor,
    norm: Any,
    attention: Any,
    modulation: Sequence[Tensor],
    text: Tensor,
    text_modulation: Sequence[Tensor] | None,
    mask: Tensor | None,
) -> Tensor:
    """modulation: six tensors, or nine if the queries of this attention are modulated too (LTX-2.3)."""
    if text_modulation is not None:
        shift, scale = text_modulation
        text = text * (1 + scale) + shift
    options = {"encoder_hidden_states": text, "query_rotary_emb": None, "attention_mask": mask}
    if len(modulation) == 6:
        result: Tensor = x + attention(norm(x), **options)
        return result
    shift, scale, gate = modulation[6:]
    return add_gated(x, attention(modulate_rms(norm, x, scale, shift), **options), gate)


def add_modulated_mlp(x: Tensor, norm: Any, mlp: Any, modulation: Sequence[Tensor]) -> Tensor:
    shift, scale, gate = modulation[3:6]
    return add_gated(x, mlp(modulate_rms(norm, x, scale, shift)), gate)


def forward_ltx2_block(
    block: Any,
    hidden_states: Tensor,
    audio_hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    audio_encoder_hidden_states: Tensor,
    temb: Tensor,
    temb_audio: Tensor,
    temb_ca_scale_shift: Tensor,
    temb_ca_audio_scale_shift: Tensor,
    temb_ca_gate: Tensor,
    temb_ca_audio_gate: Tensor,
    temb_prompt: Tensor | None = None,
    temb_prompt_audio: Tensor | None = None,
    video_rotary_emb: Any = None,
    audio_rotary_emb: Any = None,
    ca_video_rotary_emb: Any = None,
    ca_audio_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
    audio_encoder_attention_mask: Tensor | None = None,
    self_attention_mask: Tensor | None = None,
    audio_self_attention_mask: Tensor | None = None,
    a2v_cross_attention_mask: Tensor | None = None,
    v2a_cross_attention_mask: Tensor | None = None,
    use_a2v_cross_attention: bool = True,
    use_v2a_cross_attention: bool = True,
    perturbation_mask: Tensor | None = None,
    all_perturbed: bool | None = None,
) -> tuple[Tensor, Tensor]:
    def split_modulation(table: Tensor, times: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = block.get_mod_params(table, times, len(hidden_states))
        return parts

    def split_text_modulation(table: Tensor, times: Tensor | None) -> Sequence[Tensor]:
        return table[None, None].to(hidden_states.dtype).unbind(2) if times is None else split_modulation(table, times)

    video, audio = hidden_states, audio_hidden_states
    options = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed} if block.perturbed_attn else {}
    video_mod = split_modulation(block.scale_shift_table, temb)
    audio_mod = split_modulation(block.audio_scale_shift_table, temb_audio)
    options["attention_mask"], options["query_rotary_emb"] = self_attention_mask, video_rotary_emb
    video = attend_self(video, block.norm1, block.attn1, video_mod, **options)
    options["attention_mask"], options["query_rotary_emb"] = audio_self_attention_mask, audio_rotary_emb
    audio = attend_self(audio, block.audio_norm1, block.audio_attn1, audio_mod, **options)
    text_mods: list[Sequence[Tensor] | None] = [None, None]
    if block.cross_attn_adaln:
        text_mods = [
            split_text_modulation(block.prompt_scale_shift_table, temb_prompt),
            split_text_modulation(block.audio_prompt_scale_shift_table, temb_prompt_audio),
        ]
    video_text = encoder_hidden_states, text_mods[0], encoder_attention_mask
    audio_text = audio_encoder_hidden_states, text_mods[1], audio_encoder_attention_mask
    video = attend_text(video, block.norm2, block.attn2, video_mod, *video_text)
    audio = attend_text(audio, block.audio_norm2, block.audio_attn2, audio_mod, *audio_text)
    if use_a2v_cross_attention or use_v2a_cross_attention:
        table, audio_table = block.video_a2v_cross_attn_scale_shift_table, block.audio_a2v_cross_attn_scale_shift_table
        parts = split_modulation(table[:4], temb_ca_scale_shift)  # scale and shift for each of the two directions
        audio_parts = split_modulation(audio_table[:4], temb_ca_audio_scale_shift)
        first_video, first_audio = video, audio  # both directions read the states before the other one
        if use_a2v_cross_attention:
            attended = block.audio_to_video_attn(
                modulate_rms(block.audio_to_video_norm, first_video, *parts[:2]),
                encoder_hidden_states=modulate_rms(block.video_to_audio_norm, first_audio, *audio_parts[:2]),
                query_rotary_emb=ca_video_rotary_emb,
                key_rotary_emb=ca_audio_rotary_emb,
                attention_mask=a2v_cross_attention_mask,
            )
            video = add_gated(video, attended, split_modulation(table[4:], temb_ca_gate)[0])
        if use_v2a_cross_attention:
            attended = block.video_to_audio_attn(
                modulate_rms(block.video_to_audio_norm, first_audio, *audio_parts[2:]),
                encoder_hidden_states=modulate_rms(block.audio_to_video_norm, first_video, *parts[2:]),
                query_rotary_emb=ca_audio_rotary_emb,
                key_rotary_emb=ca_video_rotary_emb,
                attention_mask=v2a_cross_attention_mask,
            )
            audio = add_gated(audio, attended, split_modulation(audio_table[4:], temb_ca_audio_gate)[0])
    video = add_modulated_mlp(video, block.norm3, block.ff, video_mod)
    return video, add_modulated_mlp(audio, block.audio_norm3, block.audio_ff, audio_mod)
