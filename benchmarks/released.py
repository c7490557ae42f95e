"""Released models by their public dimensions, without weights, to count the cost of forward passes.

The numbers are from the configurations of the published diffusers folders; nothing was downloaded. A test checks the
resulting numbers of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.cosmos25_action_network import CosmosActionPipeline, CosmosActionTransformer3DModel

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """One released pipeline. The factories of its parts are called with the meta device as the default device."""

    title: str
    folder: str  # last part of its Hub id, and of the user's path
    pipeline: type[Any]
    transformer: Callable[..., nn.Module]  # accepts overrides of its configuration
    vae: Callable[[], nn.Module]
    scheduler: Callable[[], Any]
    conditioning: Mapping[str, tuple[int, ...]]  # shapes for one text; names that end with `mask` are int64
    size: tuple[int, int, int]  # height, width, frames of the published examples
    fixed_tokens: int = 0  # tokens of a text that model.max_sequence_length does not limit
    frozen_conditioning: Mapping[str, tuple[int, ...]] | None = None  # if different with frozen text layers
    other_parts: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    text_parameters: int = 0  # all text encoders together, to three digits

    def load(self, device: torch.device = META, **changes: Any) -> DiffusionModel:
        """Return the family with a bfloat16 denoiser: without values on the meta device, with random values on another
        device.

        changes: overrides of the denoiser's configuration. Raises ModelError if no family loads the pipeline.
        """
        known = {name: family for family in registry.model_families().values() for name in family.pipeline_classes}
        if self.pipeline.__name__ not in known:
            raise ModelError(f"{self.title}: no family loads a {self.pipeline.__name__}")
        parts: dict[str, Any] = dict.fromkeys(list(inspect.signature(self.pipeline.__init__).parameters)[1:])
        with device:
            parts |= {"transformer": self.transformer(**changes).bfloat16(), "vae": self.vae()}
            parts |= {name: make() for name, make in self.other_parts.items()}
        parts["scheduler"] = self.scheduler()
        family = known[self.pipeline.__name__]
        return family(
            self.pipeline(**parts | family.placeholder_components()),
            Path(self.folder),
            dtype=torch.bfloat16,
            device=device,
            max_sequence_length=None,
            inputs=[name for name, spec in family.input_specs.items() if spec.required],
        )

    def conditioning_shapes(self, *, frozen: bool, max_sequence_length: int | None = None) -> dict[str, Tensor]:
        """Return the conditioning of one text as tensors without values. frozen: with frozen text layers
        (freeze_all_but)."""
        shapes = dict((self.frozen_conditioning if frozen else None) or self.conditioning)
        if max_sequence_length is not None:
            longest = self.fixed_tokens + max_sequence_length
            shapes |= {name: (longest, *shape[1:]) for name, shape in shapes.items() if name.startswith("prompt_")}
        return {
            name: torch.empty(1, *shape, device="meta", dtype=torch.int64 if name.endswith("mask") else torch.bfloat16)
            for name, shape in shapes.items()
        }


ltx2_vae = partial(
    diffusers.AutoencoderKLLTX2Video, spatial_compression_ratio=32, temporal_compression_ratio=8, decoder_causal=False
)
wan_unipc = partial(
    diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
)
wan = partial(
    diffusers.WanTransformer3DModel,
    patch_size=(1, 2, 2),
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=4096,
    freq_dim=256,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
)
wan_14b = partial(wan, num_layers=40, num_attention_heads=40, ffn_dim=13824)
wan_i2v = partial(wan_14b, in_channels=36)
cosmos = partial(
    diffusers.CosmosTransformer3DModel,
    patch_size=(1, 2, 2),
    in_channels=16 + 1,
    out_channels=16,
    num_layers=28,
    attention_head_dim=128,
    num_attention_heads=16,
    mlp_ratio=4.0,
    text_embed_dim=1024,
    adaln_lora_dim=256,
    max_size=(128, 240, 240),
    rope_scale=(1.0, 3.0, 3.0),
    concat_padding_mask=True,
    extra_pos_embed_type=None,
    use_crossattn_projection=True,
    crossattn_proj_in_channels=100352,
    encoder_hidden_states_channels=1024,
)
cosmos3 = partial(diffusers.Cosmos3OmniTransformer, action_gen=True, action_dim=64)
cosmos3_edge = partial(
    cosmos3,
    num_hidden_layers=28,
    hidden_size=2048,
    intermediate_size=9216,
    num_attention_heads=16,
    vocab_size=131072,
    hidden_act="relu2",
    qk_norm_for_text=False,
    use_und_k_norm_for_gen=True,
)
cosmos3_super = partial(
    cosmos3, num_hidden_layers=64, hidden_size=5120, intermediate_size=25600, num_attention_heads=64
)
kl_vae = partial(
    diffusers.AutoencoderKL,
    latent_channels=16,
    layers_per_block=2,
    use_quant_conv=False,
    use_post_quant_conv=False,
    block_out_channels=(128, 256, 512, 512),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
)
flux_vae = partial(kl_vae, scaling_factor=0.3611, shift_factor=0.1159)
qwen_scheduler = partial(
    diffusers.FlowMatchEulerDiscreteScheduler,
    use_dynamic_shifting=True,
    base_shift=0.5,
    max_shift=0.9,
    base_image_seq_len=256,
    max_image_seq_len=8192,
    shift=1.0,
    shift_terminal=0.02,
)
wan22_vae = partial(
    diffusers.AutoencoderKLWan,
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
    scale_factor_temporal=4,
    latents_mean=[0.0] * 48,  # only the shape matters here
    latents_std=[1.0] * 48,
)


def clip_huge() -> nn.Module:
    """Return the image encoder of Wan 2.1, ViT-H/14."""
    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "image_size": 224, "patch_size": 14}
    config = CLIPVisionConfig(**sizes, num_hidden_layers=32, num_attention_heads=16)
    encoder: nn.Module = CLIPVisionModel(config).bfloat16()
    return encoder


def cosmos3_text(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the cached keys and values of a text tower for 300 tokens."""
    cached = (300, num_layers, 8, 128)
    return {"text_keys": cached, "text_values": cached, "text_mask": (300,)}


# Parameters of text encoders.
GEMMA_2B, UMT5_XXL, QWEN_7B = 2_610_000_000, 5_680_000_000, 8_290_000_000
QWEN3_4B, MISTRAL_24B = 4_020_000_000, 24_000_000_000
CLIP_L_AND_T5_XXL = 4_890_000_000
GEMMA3_12B_AND_CONNECTORS = 13_600_000_000
QWEN_7B_TEXT_AND_BYT5 = 7_290_000_000

# Parts that several entries of RELEASED share.
qwen_image_released = partial(
    Released,
    pipeline=diffusers.QwenImagePipeline,
    transformer=diffusers.QwenImageTransformer2DModel,
    vae=diffusers.AutoencoderKLQwenImage,
    scheduler=qwen_scheduler,
    size=(1024, 1024, 1),
    text_parameters=QWEN_7B,
)
wan_released = partial(
    Released,
    pipeline=diffusers.WanPipeline,
    transformer=wan_14b,
    vae=diffusers.AutoencoderKLWan,
    scheduler=wan_unipc,
    conditioning={"prompt_embeds": (512, 4096)},
    size=(480, 832, 81),
    text_parameters=UMT5_XXL,
)
cosmos25_released = partial(
    Released,
    pipeline=diffusers.Cosmos2_5_PredictBasePipeline,
    transformer=cosmos,
    vae=diffusers.AutoencoderKLWan,
    scheduler=wan_unipc,
    conditioning={"prompt_embeds": (512, 100352)},
    frozen_conditioning={"prompt_embeds": (512, 1024)},
    size=(704, 1280, 93),
    other_parts={"safety_checker": nn.Identity},
    text_parameters=QWEN_7B,
)
cosmos3_released = partial(
    Released, pipeline=diffusers.Cosmos3OmniPipeline, vae=wan22_vae, scheduler=wan_unipc, size=(704, 1280, 93)
)

RELEASED = {
    "sd35m": Released(
        title="Stable Diffusion 3.5 medium",
        folder="stable-diffusion-3.5-medium",
        pipeline=diffusers.StableDiffusion3Pipeline,
        transformer=partial(
            diffusers.SD3Transformer2DModel,
            sample_size=128,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=24,
            attention_head_dim=64,
            num_attention_heads=24,
            joint_attention_dim=4096,
            caption_projection_dim=1536,
            pooled_projection_dim=2048,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        ),
        vae=partial(kl_vae, scaling_factor=1.5305, shift_factor=0.0609),
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0),
        conditioning={"prompt_embeds": (77 + 256, 4096), "pooled_prompt_embeds": (2048,)},
        fixed_tokens=77,
        size=(512, 512, 1),
        text_parameters=5_580_000_000,  # CLIP-L, CLIP-G and T5-XXL's encoder
    ),
    "sana": Released(
        title="SANA 1.5 1.6B",
        folder="SANA1.5_1.6B_1024px_diffusers",
        pipeline=diffusers.SanaPipeline,
        transformer=partial(
            diffusers.SanaTransformer2DModel,
            sample_size=32,
            patch_size=1,
            in_channels=32,
            out_channels=32,
            num_layers=20,
            attention_head_dim=32,
            num_attention_heads=70,
            cross_attention_head_dim=112,
            num_cross_attention_heads=20,
            cross_attention_dim=2240,
            caption_channels=2304,
            mlp_ratio=2.5,
            qk_norm="rms_norm_across_heads",
        ),
        vae=partial(
            diffusers.AutoencoderDC,
            encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
            decoder_layers_per_block=(3, 3, 3, 3, 3, 3),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41407,
        ),
        scheduler=partial(
            diffusers.DPMSolverMultistepScheduler,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
        ),
        conditioning={"prompt_embeds": (300, 2304), "prompt_attention_mask": (300,)},
        size=(1024, 1024, 1),
        text_parameters=GEMMA_2B,
    ),
    "flux2_klein": Released(
        title="FLUX.2-klein base 4B",
        folder="FLUX.2-klein-base-4B",
        pipeline=diffusers.Flux2KleinPipeline,
        transformer=partial(
            diffusers.Flux2Transformer2DModel,
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=3 * 2560,
            guidance_embeds=False,
        ),
        vae=diffusers.AutoencoderKLFlux2,
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True, shift=3.0),
        conditioning={"prompt_embeds": (512, 3 * 2560)},
        size=(1024, 1024, 1),
        text_parameters=QWEN3_4B,
    ),
    "flux2_dev": Released(
        title="FLUX.2-dev 32B",
        folder="FLUX.2-dev",
        pipeline=diffusers.Flux2Pipeline,
        transformer=diffusers.Flux2Transformer2DModel,
        vae=diffusers.AutoencoderKLFlux2,
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True, shift=3.0),
        conditioning={"prompt_embeds": (512, 3 * 5120)},
        size=(1024, 1024, 1),
        text_parameters=MISTRAL_24B,
    ),
    "flux_kontext": Released(
        title="FLUX.1-Kontext 12B",
        folder="FLUX.1-Kontext-dev",
        pipeline=diffusers.FluxKontextPipeline,
        transformer=partial(diffusers.FluxTransformer2DModel, guidance_embeds=True),
        vae=flux_vae,
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True, shift=3.0),
        conditioning={"prompt_embeds": (512, 4096), "pooled_prompt_embeds": (768,)},
        size=(1024, 1024, 1),
        text_parameters=CLIP_L_AND_T5_XXL,
    ),
    "qwen_image": qwen_image_released(
        title="Qwen-Image 20B",
        folder="Qwen-Image",
        conditioning={"prompt_embeds": (512, 3584), "prompt_embeds_mask": (512,)},
    ),
    "qwen_image_edit": qwen_image_released(
        title="Qwen-Image-Edit 20B",
        folder="Qwen-Image-Edit",
        pipeline=diffusers.QwenImageEditPipeline,
        conditioning={"prompt_embeds": (1369 + 512, 3584), "prompt_embeds_mask": (1369 + 512,)},
        fixed_tokens=1369,  # of the source image
    ),
    "qwen_image_edit_plus": qwen_image_released(
        title="Qwen-Image-Edit-2511 20B",
        folder="Qwen-Image-Edit-2511",
        pipeline=diffusers.QwenImageEditPlusPipeline,
        transformer=partial(diffusers.QwenImageTransformer2DModel, zero_cond_t=True),
        conditioning={"prompt_embeds": (196 + 512, 3584), "prompt_embeds_mask": (196 + 512,)},
        fixed_tokens=196,  # of the source image
    ),
    "z_image": Released(
        title="Z-Image 6B",
        folder="Z-Image",
        pipeline=diffusers.ZImagePipeline,
        transformer=partial(diffusers.ZImageTransformer2DModel, axes_lens=[1536, 512, 512]),
        vae=flux_vae,
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=6.0),
        conditioning={"prompt_embeds": (512, 2560), "prompt_embeds_mask": (512,)},
        size=(1024, 1024, 1),
        text_parameters=QWEN3_4B,
    ),
    "sana_video": Released(
        title="SANA-Video 2B",
        folder="SANA-Video_2B_480p_diffusers",
        pipeline=diffusers.SanaVideoPipeline,
        transformer=partial(diffusers.SanaVideoTransformer3DModel, mlp_ratio=3.0),
        vae=diffusers.AutoencoderKLWan,
        scheduler=partial(
            diffusers.DPMSolverMultistepScheduler,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=8.0,
        ),
        conditioning={"prompt_embeds": (300, 2304), "prompt_attention_mask": (300,)},
        size=(480, 832, 81),
        text_parameters=GEMMA_2B,
    ),
    "sana_wm": Released(
        title="SANA-WM 2.6B",
        folder="SANA-WM_bidirectional-diffusers",
        pipeline=diffusers.SanaWMPipeline,
        transformer=diffusers.SanaWMTransformer3DModel,
        vae=ltx2_vae,
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=9.8),
        conditioning={"prompt_embeds": (300, 2304), "prompt_attention_mask": (300,)},
        size=(704, 1280, 161),
        text_parameters=GEMMA_2B,
    ),
    "ltx2": Released(
        title="LTX-2 19B",
        folder="LTX-2",
        pipeline=diffusers.LTX2Pipeline,
        transformer=diffusers.LTX2VideoTransformer3DModel,
        vae=ltx2_vae,
        scheduler=partial(
            diffusers.FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05
        ),
        conditioning={"video_embeds": (1024, 3840), "audio_embeds": (1024, 3840), "embeds_mask": (1024,)},
        size=(512, 768, 121),
        other_parts={
            "audio_vae": diffusers.AutoencoderKLLTX2Audio,
            "vocoder": LTX2Vocoder,
            "connectors": LTX2TextConnectors,
        },
        text_parameters=GEMMA3_12B_AND_CONNECTORS,
    ),
    "wan1.3b": wan_released(
        title="Wan 2.1 1.3B",
        folder="Wan2.1-T2V-1.3B-Diffusers",
        transformer=partial(wan, num_layers=30, num_attention_heads=12, ffn_dim=8960),
    ),
    "wan14b": wan_released(
        title="Wan 2.1 14B",
        folder="Wan2.1-T2V-14B-Diffusers",
    ),
    "wan22": wan_released(
        title="Wan 2.2 A14B",
        folder="Wan2.2-T2V-A14B-Diffusers",
        other_parts={"transformer_2": lambda: wan_14b().bfloat16(), "boundary_ratio": lambda: 0.875},
    ),
    "wan21_i2v": wan_released(
        title="Wan 2.1 I2V 14B",
        folder="Wan2.1-I2V-14B-480P-Diffusers",
        pipeline=diffusers.WanImageToVideoPipeline,
        transformer=partial(wan_i2v, image_dim=1280, added_kv_proj_dim=5120),
        other_parts={"image_encoder": clip_huge},
    ),
    "wan22_i2v": wan_released(
        title="Wan 2.2 I2V A14B",
        folder="Wan2.2-I2V-A14B-Diffusers",
        pipeline=diffusers.WanImageToVideoPipeline,
        transformer=wan_i2v,
        other_parts={"transformer_2": lambda: wan_i2v().bfloat16(), "boundary_ratio": lambda: 0.9},
    ),
    "wan_vace": wan_released(
        title="Wan 2.1 VACE 1.3B",
        folder="Wan2.1-VACE-1.3B-diffusers",
        pipeline=diffusers.WanVACEPipeline,
        transformer=partial(
            diffusers.WanVACETransformer3DModel,
            num_layers=30,
            num_attention_heads=12,
            ffn_dim=8960,
            vace_layers=list(range(0, 30, 2)),
        ),
    ),
    "ti2v5b": wan_released(
        title="Wan 2.2 TI2V 5B",
        folder="Wan2.2-TI2V-5B-Diffusers",
        transformer=partial(wan, num_layers=30, num_attention_heads=24, ffn_dim=14336, in_channels=48, out_channels=48),
        vae=wan22_vae,
        scheduler=partial(wan_unipc, flow_shift=5.0),
        size=(704, 1280, 121),
        other_parts={"expand_timesteps": lambda: True},
    ),
    "hunyuan_video15": Released(
        title="HunyuanVideo-1.5 8.3B",
        folder="HunyuanVideo-1.5-Diffusers-480p_t2v",
        pipeline=diffusers.HunyuanVideo15Pipeline,
        transformer=diffusers.HunyuanVideo15Transformer3DModel,
        vae=diffusers.AutoencoderKLHunyuanVideo15,
        scheduler=partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=5.0),
        conditioning={
            "prompt_embeds": (1000, 3584),
            "prompt_embeds_mask": (1000,),
            "glyph_embeds": (256, 1472),
            "glyph_embeds_mask": (256,),
        },
        size=(480, 848, 121),
        text_parameters=QWEN_7B_TEXT_AND_BYT5,
    ),
    "cosmos2b": cosmos25_released(
        title="Cosmos-Predict2.5 2B",
        folder="Cosmos-Predict2.5-2B",
    ),
    "cosmos2b_actions": cosmos25_released(
        title="Cosmos-Predict2.5 2B with actions",
        folder="Cosmos-Predict2.5-2B-action-cond",
        pipeline=CosmosActionPipeline,
        transformer=CosmosActionTransformer3DModel,
        size=(256, 320, 13),
    ),
    "cosmos3_edge": cosmos3_released(
        title="Cosmos3 Edge",
        folder="Cosmos3-Edge",
        transformer=cosmos3_edge,
        conditioning=cosmos3_text(28),
        size=(480, 832, 93),
        text_parameters=1_680_000_000,
    ),
    "cosmos3_nano": cosmos3_released(
        title="Cosmos3 Nano",
        folder="Cosmos3-Nano",
        transformer=cosmos3,
        conditioning=cosmos3_text(36),
        text_parameters=7_570_000_000,
    ),
    "cosmos3_super": cosmos3_released(
        title="Cosmos3 Super",
        folder="Cosmos3-Super",
        transformer=cosmos3_super,
        conditioning=cosmos3_text(64),
        text_parameters=32_000_000_000,
    ),
    "cosmos14b": cosmos25_released(
        title="Cosmos-Predict2.5 14B",
        folder="Cosmos-Predict2.5-14B",
        transformer=partial(cosmos, num_layers=36, num_attention_heads=40),
    ),
}
RELEASED["qwen_image_edit_2509"] = replace(
    RELEASED["qwen_image_edit_plus"],
    title="Qwen-Image-Edit-2509 20B",
    folder="Qwen-Image-Edit-2509",
    transformer=diffusers.QwenImageTransformer2DModel,
)
