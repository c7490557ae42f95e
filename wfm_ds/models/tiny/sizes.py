"""The diffusers configs of the transformers of the tiny pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def set_sizes(base: Mapping[str, Any] | None = None, **sizes: Any) -> Mapping[str, Any]:
    return MappingProxyType({**(base or {}), **sizes})


# Sizes of many transformers: width 32, 4 latent channels.
SMALL = set_sizes(in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=16)
# One block has dual attention; queries and keys have RMS norms.
SD3 = set_sizes(
    sample_size=16,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=64,
    caption_projection_dim=32,
    pooled_projection_dim=64,
    pos_embed_max_size=32,
    qk_norm="rms_norm",
    dual_attention_layers=(0,),
)
# 1.3 million parameters: learns 8x8 digits on a laptop within minutes.
DIGITS = set_sizes(
    SD3,
    sample_size=8,
    in_channels=3,
    out_channels=3,
    num_layers=4,
    attention_head_dim=32,
    num_attention_heads=3,
    caption_projection_dim=96,
    pos_embed_max_size=4,
    dual_attention_layers=(),
)
FLUX2 = set_sizes(
    patch_size=1,
    in_channels=16,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=96,  # three layers of the text encoder
    timestep_guidance_channels=32,
    axes_dims_rope=(4, 4, 4, 4),
    guidance_embeds=False,
)
FLUX2_DEV = set_sizes(FLUX2, guidance_embeds=True)
# 0.3 million parameters. An image has 32 tokens of 4 numbers each, and so has its source. The high rotary frequencies
# let a token find the token at the same position of the source, which is hard to learn with the default frequencies.
EDITS = set_sizes(
    FLUX2,
    in_channels=4,
    num_layers=2,
    num_attention_heads=4,
    axes_dims_rope=(2, 6, 6, 2),
    rope_theta=5,
)
# As LTX-2.3, with gates, a second time embedding for texts, and blocks that can skip self-attention.
LTX2 = set_sizes(
    SMALL,
    cross_attention_dim=32,
    vae_scale_factors=(2, 8, 8),
    audio_in_channels=4,
    audio_out_channels=4,
    audio_num_attention_heads=2,
    audio_attention_head_dim=8,
    audio_cross_attention_dim=16,
    caption_channels=32,
    rope_type="split",
    rope_double_precision=False,
    gated_attn=True,
    cross_attn_mod=True,
    audio_gated_attn=True,
    audio_cross_attn_mod=True,
    perturbed_attn=True,
)
HUNYUAN_VIDEO15 = set_sizes(
    SMALL,
    in_channels=9,  # 4 latent channels, 4 of conditioning frames and their mask
    num_refiner_layers=1,
    text_embed_dim=32,
    text_embed_2_dim=64,
    image_embed_dim=16,
    rope_axes_dim=(4, 6, 6),
    task_type="t2v",
)
FLUX_KONTEXT = set_sizes(
    in_channels=16,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=64,
    pooled_projection_dim=32,
    guidance_embeds=True,
    axes_dims_rope=(4, 6, 6),
)
SANA = set_sizes(
    SMALL,
    num_cross_attention_heads=2,
    cross_attention_head_dim=16,
    cross_attention_dim=32,
    caption_channels=32,
    sample_size=8,
    patch_size=1,
    mlp_ratio=2.0,
)
SANA_VIDEO = set_sizes(SANA, sample_size=30, patch_size=(1, 2, 2), rope_max_seq_len=32)
WAN = set_sizes(
    SMALL,
    patch_size=(1, 2, 2),
    text_dim=32,
    freq_dim=32,
    ffn_dim=64,
    rope_max_seq_len=32,
)
WAN_IMAGE = set_sizes(WAN, in_channels=12)  # four latents, four frame masks, four image latents
WAN_VACE = set_sizes(WAN, vace_layers=[0, 1], vace_in_channels=2 * 4 + 8**2)  # latents and the mask of 8 x 8 pixels
WAN21_IMAGE = set_sizes(WAN_IMAGE, image_dim=16, added_kv_proj_dim=32)
# 0.6 million parameters, 32 tokens per video. A token has 16 numbers, few relative to the width of 96. With 64 numbers
# per token, the model did not learn shapes.
MOVING = set_sizes(WAN, num_attention_heads=3, attention_head_dim=32, freq_dim=64, ffn_dim=256, num_layers=4)
COSMOS3 = set_sizes(
    vocab_size=435,  # of qwen_tokenizer
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,  # allows two sequence-parallel ranks
    head_dim=16,
    rope_scaling={"mrope_section": [4, 2, 2]},
    rope_theta=1e4,
    unified_3d_mrope_temporal_modality_margin=100,
    latent_channel=4,
    latent_patch_size=2,
    patch_latent_dim=16,
    action_gen=True,
    action_dim=16,
    num_embodiment_domains=5,
)
# 0.3 million parameters; 6 video tokens and 8 action tokens. A token has 16 numbers, few relative to the width of 64.
WORLD = set_sizes(
    COSMOS3,
    hidden_size=64,
    intermediate_size=192,
    num_attention_heads=2,
    head_dim=32,
    rope_scaling={"mrope_section": [8, 4, 4]},
    rope_theta=10.0,
    action_dim=3,
    num_embodiment_domains=1,
)
QWEN_IMAGE = set_sizes(
    SMALL,
    patch_size=2,
    in_channels=16,
    joint_attention_dim=32,
    axes_dims_rope=(8, 4, 4),
)
QWEN_IMAGE_EDIT_2511 = set_sizes(QWEN_IMAGE, zero_cond_t=True)
Z_IMAGE = set_sizes(
    in_channels=4,
    dim=32,
    n_layers=2,
    n_refiner_layers=1,
    n_heads=2,
    n_kv_heads=2,
    cap_feat_dim=32,
    axes_dims=[8, 4, 4],
    axes_lens=[256, 32, 32],
)
SANA_WM = set_sizes(
    in_channels=4,
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    softmax_every_n=2,
    linear_head_dim=16,
    chunk_plucker_channels=6 * 2,
    chunk_plucker_post_attn_blocks=2,
    caption_channels=32,
    mlp_ratio=2.0,
)
COSMOS25 = set_sizes(
    SMALL,
    in_channels=5,  # 4 latent channels and the mask of conditioning frames
    mlp_ratio=2.0,
    text_embed_dim=32,
    adaln_lora_dim=8,
    max_size=(8, 32, 32),
    patch_size=(1, 2, 2),
    rope_scale=(1.0, 3.0, 3.0),
    concat_padding_mask=True,
    extra_pos_embed_type=None,
    use_crossattn_projection=True,
    crossattn_proj_in_channels=64,  # both layers of the text encoder
    encoder_hidden_states_channels=32,
)
COSMOS25_ACTIONS = set_sizes(COSMOS25, action_dim=3, action_hidden_size=64)  # as in `wfm data brightness`
