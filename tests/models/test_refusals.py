"""Pipelines and settings that a family does not support raise a one-sentence error."""

import pytest
from diffusers import WanTransformer3DModel

from each_case import check_each
from families import change_json, copy_pipeline, load_tiny
from wfm_ds.errors import ModelError
from wfm_ds.models.sana import INSTRUCTION
from wfm_ds.models.tiny.sizes import WAN

pytestmark = pytest.mark.slow

NULL = [None, None]
CLIP = {"image_dim": 16, "added_kv_proj_dim": 32}
NO_LINES = "complex_human_instruction must be null or a list of lines"
# Family, changes to model_index.json, changes to another file, loading options, text in the error message.
CASES = [
    *(
        ("qwen_image", {}, ("transformer/config.json", {key: True}), {}, f"transformer with {key} is not supported")
        for key in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond")
    ),
    ("z_image", {}, ("transformer/config.json", {"siglip_feat_dim": 8}), {}, "with image inputs"),
    ("z_image", {}, ("transformer/config.json", {"all_patch_size": [2, 4]}), {}, "with patches"),
    *(("sana", {}, ("call.json", {INSTRUCTION: lines}), {}, NO_LINES) for lines in ("Draw", [1], 5)),
    ("sd3", {}, None, {"prompt_template": "stock"}, "sd3 has no prompt template 'stock'; remove model.prompt_template"),
    ("sd3", {}, None, {"guardrail": "off"}, "sd3 has no guardrail; remove"),
    ("cosmos3", {}, None, {"max_sequence_length": 64}, "does not truncate prompts"),
    ("wan21_i2v", {}, None, {"max_sequence_length": 64}, "requires 512 text tokens; remove model.max_sequence_length"),
    ("wan21_i2v", {"image_encoder": NULL}, None, {}, "has no image_encoder, which encodes the first frame"),
    ("wan22_i2v", {"_class_name": "WanPipeline"}, None, {}, "a complete WanImageToVideoPipeline"),
    ("wan21", {"boundary_ratio": 0.9}, None, {}, "must have both transformer_2 and boundary_ratio, or neither"),
    ("wan22", {"boundary_ratio": None}, None, {}, "must have both transformer_2 and boundary_ratio, or neither"),
]
# Family, changes to model_index.json, transformer sizes, text in the error message.
WAN_NETWORKS = [
    (
        "wan21",
        {"_class_name": "WanImageToVideoPipeline", "image_encoder": NULL, "image_processor": NULL},
        {"in_channels": 9},
        "9 input channels is not supported, only 4 (latents) or 12 (latents",
    ),
    (
        "wan21_i2v",
        {},
        {"in_channels": 12, **CLIP, "pos_embed_seq_len": 10},
        "first-and-last-frame checkpoints are not supported",
    ),
    ("wan21_i2v", {}, CLIP, "4 input channels is not supported"),
    ("wan22_i2v", {}, {"in_channels": 4}, "two experts have different inputs"),
]


def assert_refused(folder, family, options, says):
    with pytest.raises(ModelError) as raised:
        load_tiny(folder, family, **options)
    assert says in str(raised.value)


@check_each(("family", "index", "file", "options", "says"), CASES)
def test_unsupported_pipelines_and_settings_are_one_line_errors(
    tiny_pipelines, tmp_path, family, index, file, options, says
):
    folder = copy_pipeline(tiny_pipelines(family), tmp_path / "pipeline", **index)
    if file is not None:
        change_json(folder / file[0], **file[1])
    assert_refused(folder, family, options, says)


@check_each(("family", "index", "sizes", "says"), WAN_NETWORKS)
def test_other_wan_networks_are_refused(tiny_pipelines, tmp_path, family, index, sizes, says):
    folder = copy_pipeline(tiny_pipelines(family), tmp_path / "pipeline", **index)
    WanTransformer3DModel(**WAN | sizes).save_pretrained(folder / "transformer")
    assert_refused(folder, family, {}, says)
