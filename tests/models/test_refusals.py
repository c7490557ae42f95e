"""Pipelines and settings that a family does not support raise a one-sentence error."""

import numpy as np
import pytest
from diffusers import WanTransformer3DModel

from each_case import check_each
from families import CASES as FAMILY_CASES
from families import change_json, copy_pipeline, load_tiny
from wfm_ds.errors import ModelError
from wfm_ds.models.sana import INSTRUCTION
from wfm_ds.models.tiny.sizes import WAN
from wfm_ds.types import FIRST_FRAME

pytestmark = pytest.mark.slow

NULL = [None, None]
CLIP = {"image_dim": 16, "added_kv_proj_dim": 32}
NO_LINES = "complex_human_instruction must be null or a list of lines"
# Family, changes to model_index.json, changes to another file, loading options, text in the error message.
CASES = [
    *(
        ("qwen_image", {}, ("transformer/config.json", {key: True}), {}, f"{key} true is not supported, only false")
        for key in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond")
    ),
    ("z_image", {}, ("transformer/config.json", {"siglip_feat_dim": 8}), {}, "siglip_feat_dim 8 is not supported"),
    ("z_image", {}, ("transformer/config.json", {"all_patch_size": [2, 4]}), {}, "all_patch_size [2, 4] is not"),
    *(("sana", {}, ("call.json", {INSTRUCTION: lines}), {}, NO_LINES) for lines in ("Draw", [1], 5)),
    ("qwen_image_edit", {"processor": NULL}, None, {}, "has no processor, but QwenImageEditPipeline needs it"),
    ("qwen_image_edit", {}, ("transformer/config.json", {"guidance_embeds": True}), {}, "guidance_embeds true is not"),
    *(
        ("hunyuan_video15", {}, (file, change), {}, says)
        for file, change, says in (
            ("transformer/config.json", {"use_meanflow": True}, "use_meanflow true is not supported"),
            ("transformer/config.json", {"patch_size": 2}, "patch_size 2 is not supported, only 1"),
            ("guider/guider_config.json", {"_class_name": "SkipLayerGuidance"}, 'only "ClassifierFreeGuidance"'),
            ("guider/guider_config.json", {"guidance_rescale": 0.7}, "guidance_rescale 0.7 is not supported, only 0.0"),
            ("guider/guider_config.json", {"stop": 0.5}, "stop 0.5 is not supported"),
        )
    ),
    ("hunyuan_video15", {}, None, {"max_sequence_length": 64}, "remove model.max_sequence_length"),
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


def test_null_means_false(tiny_pipelines, tmp_path):
    folder = copy_pipeline(tiny_pipelines("qwen_image"), tmp_path / "pipeline")
    change_json(folder / "transformer" / "config.json", guidance_embeds=None)
    load_tiny(folder, "qwen_image")


@check_each(("family", "index", "sizes", "says"), WAN_NETWORKS)
def test_other_wan_networks_are_refused(tiny_pipelines, tmp_path, family, index, sizes, says):
    folder = copy_pipeline(tiny_pipelines(family), tmp_path / "pipeline", **index)
    WanTransformer3DModel(**WAN | sizes).save_pretrained(folder / "transformer")
    assert_refused(folder, family, {}, says)


SIZE = (32, 48, 9)
SHAPE, CONTROL_SHAPE = r"\[32, 48, 3\]", r"\[9, 32, 48, 3\]"
# Family, function from the inputs of a sample to the changed inputs (None: removed), text in the error message.
BAD_INPUTS = [
    ("cosmos3", lambda row: {"actions": row["actions"][:7]}, r"actions must be \[8, 1 to 16\], got \[7, 9\]"),
    ("cosmos3", lambda _: {"actions": np.zeros((8, 17))}, r"got \[8, 17\]"),
    ("cosmos3", lambda _: {"actions": np.zeros(8)}, r"got \[8\]"),
    ("cosmos3", lambda _: {"domain": np.array(5)}, "domain must be an integer from 0 to 4"),
    ("cosmos3", lambda _: {"domain": np.array(1.7)}, "domain must be an integer from 0 to 4"),
    ("cosmos3", lambda _: {"actions": None}, "either all samples of a batch must have actions or none"),
    ("cosmos25_actions", lambda _: {"actions": None}, "actions is missing"),
    ("cosmos25_actions", lambda row: {"actions": row["actions"][:7]}, r"actions must be \[8, 3\], got \[7, 3\]"),
    ("cosmos25_actions", lambda _: {"actions": np.zeros((8, 7))}, r"actions must be \[8, 3\], got \[8, 7\]"),
    ("sana_wm", lambda _: {"c2w": None}, "a sample has no c2w"),
    ("sana_wm", lambda row: {"c2w": row["c2w"][:4]}, r"c2w must be \[9, 4, 4\], got \[4, 4, 4\]"),
    ("sana_wm", lambda _: {"intrinsics": np.ones((4, 4))}, r"intrinsics must be \[4\] or \[9, 4\], got \[4, 4\]"),
    ("sana_wm", lambda _: {"intrinsics": np.array([0, 1, 2, 2])}, "focal lengths must be positive"),
    ("wan22_i2v", lambda _: {FIRST_FRAME: None}, "1 of 2 samples have no first frame"),
    ("wan22_i2v", lambda _: {FIRST_FRAME: np.zeros((16, 48, 3))}, rf"must be {SHAPE}, got \[16, 48, 3\]"),
    ("wan_vace", lambda _: {"control": None}, "control is missing"),
    (
        "wan_vace",
        lambda row: {"control": row["control"][:5]},
        rf"control must be uint8 {CONTROL_SHAPE}, got uint8 \[5,",
    ),
    ("wan_vace", lambda row: {"control_mask": row["control_mask"] / 1}, "control_mask must be uint8 .*, got float64"),
    ("flux2", lambda _: {"source": None}, "^source is missing$"),
    (
        "flux2",
        lambda row: {"source_2": row["source"][:16]},
        rf"source_2 must be uint8 {SHAPE}, got uint8 \[16, 48, 3\]",
    ),
    ("flux2", lambda row: {"source": row["source"] / 255}, rf"^source must be uint8 {SHAPE}, got float64 {SHAPE}$"),
    ("qwen_image_edit", lambda _: {"source": None}, "source is missing"),
]


def create_inputs(family):
    """Return the inputs of a sample that fits."""
    if family == "wan22_i2v":
        return {FIRST_FRAME: np.zeros((*SIZE[:2], 3), np.float32)}
    if family == "sana_wm":
        return {
            "c2w": np.tile(np.eye(4, dtype=np.float32), (9, 1, 1)),
            "intrinsics": np.array([40.0, 41.0, 24.0, 16.0]),
        }
    return FAMILY_CASES[family].inputs(*SIZE)[0]


@check_each(("family", "change", "says"), BAD_INPUTS)
def test_inputs_that_do_not_fit_are_refused(tiny_pipelines, family, change, says):
    good = create_inputs(family)
    model = load_tiny(tiny_pipelines(family), family, inputs=sorted(good))
    bad = {name: array for name, array in (good | change(good)).items() if array is not None}
    with pytest.raises(ValueError, match=says):
        model.encode_inputs([good, bad], SIZE[2], SIZE[:2])
