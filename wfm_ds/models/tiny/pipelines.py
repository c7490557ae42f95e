"""The table of the tiny pipelines: classes, sizes, call arguments and build functions of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import diffusers
from torch import nn

from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.cosmos25_action_network import CosmosActionPipeline, CosmosActionTransformer3DModel
from wfm_ds.models.tiny import encoders, sizes, vaes
from wfm_ds.models.tiny.encoders import Parts
from wfm_ds.models.tiny.weights import (
    amplify_cross_attention,
    amplify_text,
    build_transformer,
    find_class,
    keep_weights,
    perturb_vectors,
    randomize_padding,
    randomize_zero_weights,
)

SECOND_TRANSFORMER_SEED = 5
PROMPT = "a red circle on white"


def create_call(prompt: str, size: tuple[int, ...], num_steps: int, **more: Any) -> dict[str, Any]:
    """Return pipeline call arguments. size: height, width and, for a video, number of frames."""
    sizes = dict(zip(("height", "width", "num_frames"), size, strict=False))
    return {"prompt": prompt, **sizes, "num_inference_steps": num_steps, **more}


IMAGE_CALL = create_call(PROMPT, (32, 32), 2)
VIDEO_CALL = create_call(PROMPT, (32, 32, 5), 2)
WAN_CALL = create_call("a red circle moving left", (32, 32, 5), 2, max_sequence_length=16)
# Without the default instruction, which is long and slow to encode.
SANA_CALL = {
    **IMAGE_CALL,
    **{"max_sequence_length": 16, "complex_human_instruction": None, "use_resolution_binning": False},
}


def flow_match(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def unipc(flow_shift: float) -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )


def dpm_solver() -> Any:
    """Return the scheduler of the released SANA models: a second-order flow solver with integer timesteps."""
    return diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )


def second_wan_expert(config: Mapping[str, Any], boundary: float) -> Parts:
    expert = build_transformer("WanTransformer3DModel", config, SECOND_TRANSFORMER_SEED)
    return {"transformer_2": expert, "boundary_ratio": boundary}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPipeline:
    """The description of a tiny pipeline. The functions in its fields build the components."""

    pipeline: type | str
    """The pipeline class, or its name in diffusers."""
    transformer: type[nn.Module] | str
    sizes: Mapping[str, Any]
    """The config of the transformer."""
    vae: Callable[[], Any]
    scheduler: Callable[[], Any]
    text: Callable[[], Parts]
    """Builds the tokenizers and text encoders. Returns {component name: component}."""
    call: Mapping[str, Any]
    """The pipeline call arguments for one small image or video, except input images and cameras."""
    change_weights: Callable[[nn.Module], None] = keep_weights
    """Changes the random transformer in place."""
    more: Callable[[], Parts] = field(default=dict)
    """Builds further components. Returns {argument of the pipeline's constructor: value}."""
    has_guardrail: bool = False

    def build(self) -> Any:
        """Return the pipeline in float32 and evaluation mode, without a safety checker."""
        parts = self.text() | self.more() | ({"safety_checker": NoGuardrail()} if self.has_guardrail else {})
        pipeline = find_class(self.pipeline)(
            transformer=build_transformer(self.transformer, self.sizes, change_weights=self.change_weights),
            vae=self.vae().eval(),
            scheduler=self.scheduler(),
            **parts,
        )
        if self.has_guardrail:
            pipeline.register_modules(safety_checker=None)
        return pipeline


sd3 = partial(TinyPipeline, pipeline="StableDiffusion3Pipeline", transformer="SD3Transformer2DModel")
flux2 = partial(
    TinyPipeline,
    transformer="Flux2Transformer2DModel",
    vae=vaes.flux2_vae,
    scheduler=partial(flow_match, use_dynamic_shifting=True, shift=3.0),
    change_weights=partial(amplify_text, 6.0),
)
wan = partial(TinyPipeline, transformer="WanTransformer3DModel", scheduler=partial(unipc, 3.0), text=encoders.wan_text)
wan_video = partial(wan, pipeline="WanPipeline", sizes=sizes.WAN, vae=vaes.wan_vae, call=WAN_CALL)
wan_image = partial(wan, pipeline="WanImageToVideoPipeline", vae=vaes.wan_vae)
qwen_image = partial(
    TinyPipeline,
    transformer="QwenImageTransformer2DModel",
    vae=vaes.qwen_image_vae,
    scheduler=partial(
        flow_match,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift=1.0,
        shift_terminal=0.02,
    ),
    change_weights=partial(amplify_text, 4.0),
    call={**IMAGE_CALL, "negative_prompt": " ", "max_sequence_length": 64},
)
cosmos25 = partial(
    TinyPipeline,
    vae=vaes.wan_vae,
    scheduler=partial(unipc, 5.0),
    text=encoders.qwen25vl_text,
    call={**VIDEO_CALL, "max_sequence_length": 64},
    has_guardrail=True,
)
cosmos3 = partial(
    TinyPipeline,
    pipeline="Cosmos3OmniPipeline",
    transformer="Cosmos3OmniTransformer",
    text=encoders.cosmos3_text,
    change_weights=perturb_vectors,
    has_guardrail=True,
)

PIPELINES: Mapping[str, TinyPipeline] = MappingProxyType(
    {
        "sd3": sd3(
            sizes=sizes.SD3,
            vae=partial(vaes.image_vae, widths=(8, 16), shift_factor=0.0609, scaling_factor=1.5305, force_upcast=False),
            scheduler=partial(flow_match, shift=3.0),
            text=partial(encoders.sd3_text, 16),
            call={**IMAGE_CALL, "max_sequence_length": 16},
        ),
        # The untrained model of the quickstart.
        "digits": sd3(
            sizes=sizes.DIGITS,
            vae=vaes.identity_vae,
            scheduler=partial(flow_match, shift=1.0),
            text=partial(encoders.sd3_text, 8),
            call=create_call("the digit 7", (8, 8), 12, max_sequence_length=8),
        ),
        # FLUX.2-klein. The pipeline concatenates the states of layers 9, 18 and 27 of the text encoder.
        "flux2": flux2(
            pipeline="Flux2KleinPipeline",
            sizes=sizes.FLUX2,
            text=partial(encoders.qwen3_text, "Qwen3ForCausalLM", 28),
            call={**IMAGE_CALL, "max_sequence_length": 24},
        ),
        # The untrained model of the edit quickstart, for 8 x 16 latents. The pipeline rejects sources with a side below
        # 64 pixels.
        "edits": flux2(
            pipeline="Flux2KleinPipeline",
            sizes=sizes.EDITS,
            vae=vaes.exact_flux2_vae,
            scheduler=partial(flow_match, shift=1.0),
            text=partial(encoders.qwen3_text, "Qwen3ForCausalLM", 28, ("invert",)),
            call=create_call("invert the left digit", (64, 128), 8, guidance_scale=1.0, max_sequence_length=12),
        ),
        "flux2_dev": flux2(
            pipeline="Flux2Pipeline",
            sizes=sizes.FLUX2_DEV,
            text=encoders.flux2_dev_text,
            call={**IMAGE_CALL, "max_sequence_length": 64},
        ),
        "flux_kontext": TinyPipeline(
            pipeline="FluxKontextPipeline",
            transformer="FluxTransformer2DModel",
            sizes=sizes.FLUX_KONTEXT,
            vae=partial(vaes.image_vae, widths=(8, 16), shift_factor=0.1159, scaling_factor=0.3611),
            scheduler=partial(flow_match, use_dynamic_shifting=True, shift=3.0),
            text=partial(encoders.flux_text, 16),
            change_weights=partial(amplify_text, 4.0),
            # The network multiplies the guidance scale by 1000. In bfloat16, 4000 is exact and the default 3500 is not.
            call=create_call(
                PROMPT, (32, 32), 2, negative_prompt="", max_sequence_length=16, max_area=32 * 32, guidance_scale=4.0
            ),
        ),
        "qwen_image": qwen_image(
            pipeline="QwenImagePipeline",
            sizes=sizes.QWEN_IMAGE,
            text=partial(encoders.qwen25vl_text, encoders.QWEN_IMAGE_WORDS),
        ),
        "qwen_image_edit": qwen_image(
            pipeline="QwenImageEditPipeline", sizes=sizes.QWEN_IMAGE, text=encoders.qwen_edit_text
        ),
        # As 2511, with time 0 for source tokens.
        "qwen_image_edit_plus": qwen_image(
            pipeline="QwenImageEditPlusPipeline", sizes=sizes.QWEN_IMAGE_EDIT_2511, text=encoders.qwen_edit_text
        ),
        # The pipeline uses the hidden states that enter the last layer of the text encoder.
        "z_image": TinyPipeline(
            pipeline="ZImagePipeline",
            transformer="ZImageTransformer2DModel",
            sizes=sizes.Z_IMAGE,
            vae=partial(vaes.image_vae, widths=(8,) * 4, shift_factor=0.1159, scaling_factor=0.3611),
            scheduler=partial(flow_match, shift=6.0),
            text=partial(encoders.qwen3_text, "Qwen3Model", 3),
            change_weights=randomize_padding,
            call={**IMAGE_CALL, "max_sequence_length": 64},
        ),
        "sana": TinyPipeline(
            pipeline="SanaPipeline",
            transformer="SanaTransformer2DModel",
            sizes=sizes.SANA,
            vae=vaes.sana_vae,
            scheduler=dpm_solver,
            text=encoders.gemma_text,
            call=SANA_CALL,
        ),
        "sana_video": TinyPipeline(
            pipeline="SanaVideoPipeline",
            transformer="SanaVideoTransformer3DModel",
            sizes=sizes.SANA_VIDEO,
            vae=vaes.wan_vae,
            scheduler=dpm_solver,
            text=encoders.gemma_text,
            call={**SANA_CALL, "prompt": "a red circle moving left", "frames": 5},
        ),
        # Video with sound.
        "ltx2": TinyPipeline(
            pipeline="LTX2Pipeline",
            transformer="LTX2VideoTransformer3DModel",
            sizes=sizes.LTX2,
            vae=vaes.ltx2_vae,
            scheduler=partial(
                flow_match,
                use_dynamic_shifting=True,
                base_shift=0.95,
                max_shift=2.05,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                shift_terminal=0.1,
            ),
            text=encoders.gemma3_text,
            more=vaes.ltx2_sound_parts,
            call={**WAN_CALL, "spatio_temporal_guidance_blocks": [1]},
        ),
        # The pipeline has no argument for guidance. Its guider is for guidance scale 6, as released.
        "hunyuan_video15": TinyPipeline(
            pipeline="HunyuanVideo15Pipeline",
            transformer="HunyuanVideo15Transformer3DModel",
            sizes=sizes.HUNYUAN_VIDEO15,
            vae=vaes.hunyuan_video15_vae,
            scheduler=partial(flow_match, shift=5.0),
            text=encoders.hunyuan_video15_text,
            change_weights=partial(amplify_text, 6.0),
            more=lambda: {"guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0)},
            call=VIDEO_CALL,
        ),
        "sana_wm": TinyPipeline(
            pipeline="SanaWMPipeline",
            transformer="SanaWMTransformer3DModel",
            sizes=sizes.SANA_WM,
            vae=vaes.ltx2_vae,
            scheduler=partial(flow_match, shift=3.0),
            text=partial(encoders.gemma_text, "Gemma2ForCausalLM"),
            change_weights=randomize_zero_weights,
            call={**WAN_CALL, "chi_prompt": ["a video of "]},  # the default is long and slow to encode
        ),
        "cosmos25": cosmos25(
            pipeline="Cosmos2_5_PredictBasePipeline", transformer="CosmosTransformer3DModel", sizes=sizes.COSMOS25
        ),
        "cosmos25_actions": cosmos25(
            pipeline=CosmosActionPipeline, transformer=CosmosActionTransformer3DModel, sizes=sizes.COSMOS25_ACTIONS
        ),
        "cosmos3": cosmos3(sizes=sizes.COSMOS3, vae=vaes.wan_vae, scheduler=partial(unipc, 5.0), call=VIDEO_CALL),
        # The untrained model of the action quickstart.
        "world": cosmos3(
            sizes=sizes.WORLD,
            vae=vaes.exact_vae,
            scheduler=partial(unipc, 1.0),
            call=create_call('{"caption": "a grey wall"}', (8, 16, 9), 8, guidance_scale=1.0),
        ),
        "wan21": wan_video(),
        # The first frame enters through extra input channels and CLIP embeddings.
        "wan21_i2v": wan_image(
            sizes=sizes.WAN21_IMAGE,
            change_weights=amplify_cross_attention,
            more=encoders.clip_image_parts,
            call={**WAN_CALL, "max_sequence_length": 512},
        ),
        # Two experts.
        "wan22": wan_video(more=partial(second_wan_expert, sizes.WAN, 0.875)),
        "wan22_i2v": wan_image(
            sizes=sizes.WAN_IMAGE, more=partial(second_wan_expert, sizes.WAN_IMAGE, 0.9), call=WAN_CALL
        ),
        # Each block has a control block.
        "wan_vace": wan_video(
            pipeline="WanVACEPipeline", transformer="WanVACETransformer3DModel", sizes=sizes.WAN_VACE
        ),
        # One timestep per token.
        "wan22_ti2v": wan_video(vae=vaes.wan22_ti2v_vae, more=partial(dict, expand_timesteps=True)),
        # The untrained model of the video quickstart, for 8 x 8 latents.
        "moving": wan_video(
            sizes=sizes.MOVING,
            vae=vaes.exact_vae,
            scheduler=partial(unipc, 1.0),
            call=create_call("a square moving left", (32, 32, 5), 12, guidance_scale=1.0, max_sequence_length=8),
        ),
    }
)
