"""Rewards that compare edited images with their source: formulas, a real HTTP server, and a tiny Qwen2.5-VL."""

import base64
import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from each_case import check_each
from reward_http import chat_reply as said
from reward_samples import loaded, media_batch
from wfm_ds.data.datasets import load_data
from wfm_ds.errors import RecipeError, RewardError
from wfm_ds.models.tiny.language import build_language_model
from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.sections import RewardFunction
from wfm_ds.training.reward_checks import check_reward_needs, check_rewards, may_see_images
from wfm_reward import registry
from wfm_reward.frames import FrameRule, score_frames

H, W = 17, 19
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(40, 216, (H, W, 3)).astype(np.uint8)
MASK = np.zeros((H, W, 3), np.uint8)
MASK[:, 8:14] = (128, 127, 129)  # bright
MASK[:, 14:] = (127, 128, 128)  # dark
RESULT = np.clip(SOURCE + RNG.normal(scale=6, size=SOURCE.shape), 0, 255).astype(np.uint8)


def score_one(reward, result=RESULT, **images):
    (score,) = reward.score(media_batch(result[None], images=[images]))
    return score


def ssim_by_windows(a, b, kept):
    """Return the mean SSIM of all Gaussian windows that are centred on a pixel of `kept`."""
    line = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    weights = np.outer(line, line) / np.outer(line, line).sum()
    values = []
    for y, x in np.argwhere(kept):
        if not (5 <= y < H - 5 and 5 <= x < W - 5):
            continue
        for channel in range(3):
            p, q = (image[y - 5 : y + 6, x - 5 : x + 6, channel].astype(np.float64) for image in (a, b))
            mean_p, mean_q = (np.sum(weights * image) for image in (p, q))
            covariance = np.cov(p.ravel(), q.ravel(), aweights=weights.ravel(), ddof=0)
            light = (2 * mean_p * mean_q + 2.55**2) / (mean_p**2 + mean_q**2 + 2.55**2)
            structure = (2 * covariance[0, 1] + 7.65**2) / (covariance[0, 0] + covariance[1, 1] + 7.65**2)
            values.append(light * structure)
    return np.mean(values)


# preservation


def test_preservation_equals_the_formulas_outside_the_mask(monkeypatch):
    """LPIPS is replaced by a distance of single pixels, because its weights are not available."""
    kept = np.ones((H, W), bool)
    kept[:, 8:14] = False
    restored = np.where(kept[..., None], RESULT, SOURCE)
    error = (RESULT.astype(np.float64) - SOURCE)[kept]
    expected = {
        "psnr_db": 20 * math.log10(255 / np.sqrt((error**2).mean())),
        "ssim": ssim_by_windows(restored, SOURCE, kept),
        "lpips": np.abs(error).mean() / 127.5,
    }
    other = RESULT.copy()
    other[~kept] = 255 - other[~kept]
    for part, full_at, limit in (("psnr_db", 40.0, 0), ("ssim", 0.999, 0), ("lpips", 0.01, 1)):
        reward = registry.create_reward("preservation", "cpu", {"measure": part.split("_")[0], "full_at": full_at})
        monkeypatch.setattr(reward, "_lpips", lambda a, b: (a - b).abs().mean(1, keepdim=True), raising=False)
        value = expected[part]
        for result in (RESULT, other):  # changes inside the mask do not count
            score = score_one(reward, result, source=SOURCE, mask=MASK)
            assert score.parts == {part: pytest.approx(value, abs=1e-6)}
            assert score.value == pytest.approx((limit - value) / (limit - full_at), abs=1e-6)
        assert score_one(reward, SOURCE, source=SOURCE, mask=MASK).value == 1.0
        assert score_one(reward, 255 - SOURCE, source=SOURCE, mask=MASK).value < score.value
    whole = score_one(loaded("preservation", whole=True, measure="ssim"), source=SOURCE)
    assert whole.value == pytest.approx(ssim_by_windows(RESULT, SOURCE, np.ones((H, W))), abs=1e-9)


def test_preservation_that_cannot_be_measured_is_a_named_failure():
    edge = np.full((H, W, 3), 255, np.uint8)
    edge[:5] = 0
    for options, images, says in (
        ({"whole": True}, {}, "the sample has no source image"),
        ({}, {"source": SOURCE}, "the sample has no mask: add it to data.reward_inputs, or set the option whole"),
        ({}, {"source": SOURCE, "mask": MASK | 255}, "the mask is bright everywhere"),
        ({}, {"source": SOURCE[1:], "mask": MASK}, "the source has shape [16, 19, 3], the sample [17, 19, 3]"),
        ({}, {"source": SOURCE, "mask": MASK[1:]}, "the mask has size [16, 19], the sample [17, 19]"),
        ({"measure": "ssim"}, {"source": SOURCE, "mask": edge}, "the mask leaves only pixels near the border"),
    ):
        assert says in score_one(loaded("preservation", **options), **images).failure
    reward, small = loaded("preservation", measure="ssim", whole=True), SOURCE[:10]
    assert "at least 11 x 11" in score_one(reward, small, source=small).failure


def test_each_frame_of_a_video_is_compared_with_the_source():
    video = np.stack([RESULT, SOURCE])[None]
    reward, batch = loaded("preservation", whole=True), media_batch(video, fps=8.0, images=[{"source": SOURCE}])
    (score,) = score_frames(reward.score, batch, FrameRule("uniform:2"), 1)
    assert score.value == pytest.approx((score_one(reward, source=SOURCE).value + 1) / 2)


# edit_judge


def judge(server, **options):
    return loaded("edit_judge", endpoint=f"{server.url}/v1", model="m", timeout_s=5.0, concurrency=1, **options)


ASPECTS = """# User Request Analysis
Score: 1
# Detailed Judgement
1. Text Faithfulness:
## Justification: better than Score: 2
## Score: 3.4
**2. Image Faithfulness:**
## Score: **4.0**
3. Physical and Visual Quality:
## Score: [2.5]
4. Text Rendering:
## Score: {}
# Summary: Score: 1"""
TWO_REPLIES = ['{"reasoning": "a "red" cat", "score": [20, 12.5]}', '{"score": [16,25],\n"reasoning": ""}']


def test_each_format_of_replies_is_parsed_and_combined(server):
    third = 1 / 3
    for template, replies, value, parts in (
        ("scores", ['<think>{"instruction": 1}</think>```json\n{"instruction": 8, "preservation": 4.5}\n```'], 0.6,
         {"instruction": 0.8, "preservation": 0.45}),
        ("scores", ['{"reasoning": "unchanged", "instruction": 0, "preservation": 10}'], 0.0,
         {"instruction": 0.0, "preservation": 1.0}),
        ("edit_score", TWO_REPLIES, math.sqrt(0.5 * 0.64), {"instruction": 0.8, "preservation": 0.5, "quality": 0.64}),
        ("rational_rewards", [ASPECTS.format("N/A")], (0.8 + 1 + 0.5) / 3,
         {"instruction": 0.8, "preservation": 1.0, "quality": 0.5}),
        ("rational_rewards", [ASPECTS.format(2)], (0.8 + 1 + 0.5 + third) / 4,
         {"instruction": 0.8, "preservation": 1.0, "quality": 0.5, "text": third}),
    ):  # fmt: skip
        server.answers = [said(reply) for reply in replies]
        score = score_one(judge(server, template=template), source=SOURCE)
        assert (score.value, score.failure) == (pytest.approx(value), None)
        assert score.parts == pytest.approx(parts)


def read_content(request):
    """Return the content of the last message, with images as arrays."""
    content = json.loads(request[2])["messages"][-1]["content"]
    urls = {i: part["image_url"]["url"] for i, part in enumerate(content) if part["type"] == "image_url"}
    images = {i: base64.b64decode(url.removeprefix("data:image/png;base64,")) for i, url in urls.items()}
    return [np.asarray(Image.open(io.BytesIO(images[i]))) if i in images else p["text"] for i, p in enumerate(content)]


def test_the_judge_receives_instruction_sources_and_result(server):
    server.answers = [said(TWO_REPLIES[0]), said(TWO_REPLIES[1])]
    prompts = {"system": "Be strict.", "edit": "A{source}B{result}C {instruction}."}
    reward = judge(server, template="edit_score", prompts=prompts, max_tokens=99)
    images = {"source_2": MASK, "source": SOURCE, "mask": MASK}
    assert reward.score(media_batch(RESULT[None], ["add {result}"], images=[images]))[0].value is not None
    edit, quality = server.requests
    request = json.loads(edit[2])
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0, 99)
    assert request["messages"][0] == {"role": "system", "content": "Be strict."}
    a, first, second, b, result, c = read_content(edit)
    assert (a, b, c) == ("A", "B", "C add {result}.")
    assert all((x == y).all() for x, y in ((first, SOURCE), (second, MASK), (result, RESULT)))
    images = [part for part in read_content(quality) if not isinstance(part, str)]
    assert len(images) == 1
    assert (images[0] == RESULT).all()


def test_a_reply_without_scores_is_a_failure_that_quotes_it(server):
    for template, reply, says in (
        ("scores", "It is\nfine. " + 99 * "x", f"no score of instruction from 0 to 10: 'It is fine. {68 * 'x'}'"),
        ("scores", '{"instruction": 11, "preservation": 3}', "no score of instruction from 0 to 10"),
        ("scores", '{"instruction": "7/10", "preservation": 3}', "no score of instruction"),
        ("edit_score", '{"score": [7]}', "no list of two scores from 0 to 25: '{\"score\": [7]}'"),
        ("edit_score", '{"score": [7, 26]}', "no list of two scores from 0 to 25"),
        ("rational_rewards", ASPECTS.format(5), "no score of Text Rendering from 1 to 4"),
        ("rational_rewards", ASPECTS.format(3).replace("3.4", "N/A"), "no score of Text Faithfulness from 1 to 4"),
        ("scores", None, "the reply has no score: TypeError"),
    ):
        server.answers = [said(reply)]
        assert says in score_one(judge(server, template=template), source=SOURCE).failure
    server.requests.clear()
    assert score_one(judge(server), mask=MASK).failure == "the sample has no source image"
    assert server.requests == []


@check_each(
    ("name", "options", "says"),
    [
        ("preservation", {"measure": "mse"}, "measure is 'mse'; it must be psnr, ssim or lpips"),
        ("preservation", {"full_at": 0}, "full_at is 0; for psnr it must be above 0 and at most 60 dB"),
        ("preservation", {"measure": "lpips", "full_at": 1}, "for lpips it must be at least 0 and below 1"),
        ("edit_judge", {"template": "x"}, "template is 'x'; it must be scores, edit_score, rational_rewards"),
        ("edit_judge", {"max_tokens": 0}, "max_tokens is 0; it must be an integer >= 1"),
        ("edit_judge", {"prompts": {"quality": "{result}"}}, r"prompts\.quality is not a text of template scores"),
        ("edit_judge", {"prompts": {"edit": "{source}"}}, r"prompts\.edit must contain \{instruction\} and \{result\}"),
    ],
)
def test_invalid_options_are_named(name, options, says):
    needed = {"endpoint": "http://x", "model": "m"} if name == "edit_judge" else {}
    with pytest.raises(RewardError, match=says):
        registry.create_reward(name, "cpu", {**needed, **options})


# edit_reward


@pytest.fixture
def edit_reward_files(tmp_path):
    """Write a tiny base model, random published weights and prompts. Return (options, network, heads, tokenizer)."""
    tiny = build_language_model("qwen25vl")
    tiny.save_pretrained(tmp_path / "base")
    tiny.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    torch.manual_seed(0)
    tiny.model.resize_token_embeddings(len(tiny.tokenizer))
    draws = [
        [torch.randn(n, m) / 3 for n, m in ((1024, 32), (1024, 1), (16, 1024), (16, 1), (2, 16), (2, 1))] for _ in "ab"
    ]
    names = [f"{layer}.{kind}" for layer in (0, 3, 5) for kind in ("weight", "bias")]
    weights = {name: weight.clone() for name, weight in tiny.model.state_dict().items()}
    for i, head in enumerate(draws):
        for name, weight in zip(names, head, strict=True):
            weights[f"rm_heads.head_{i}.{name}"] = weight[:, 0].clone() if name.endswith("bias") else weight
    save_file(weights, tmp_path / "model.safetensors")
    folder = tmp_path / "EditReward" / "dataset"
    folder.mkdir(parents=True)
    prompts = (
        'import gone\nINSTRUCTION_EDIT_FOLLOWING = "1 {text_prompt}"\nINSTRUCTION_EDIT_QUALITY = """2 {text_prompt}"""'
    )
    (folder / "prompts.py").write_text(prompts)
    (folder / "data_collator_qwen_edit.py").write_text('prompt_with_special_token = "\\nrate: <|Reward|>\\nEND"')
    options = {"code": str(tmp_path), "model": str(tmp_path / "model.safetensors"), "base": str(tmp_path / "base")}
    return {**options, "dtype": "float32"}, tiny, draws


def expected_rating(tiny, head, prompt):
    """Return the first output of a head for SOURCE, RESULT and a prompt. All tokens are concatenated by hand."""

    def embed(text):
        return tiny.model.get_input_embeddings()(torch.tensor(tiny.tokenizer(text)["input_ids"]))

    size = {"shortest_edge": 256 * 784, "longest_edge": 256 * 784}
    pixels = tiny.image_processor([Image.fromarray(SOURCE), Image.fromarray(RESULT)], size=size, return_tensors="pt")
    features = tiny.model.model.get_image_features(**pixels).pooler_output
    assert [len(feature) for feature in features] == [17 * 16] * 2
    start, end = embed("<|vision_start|>"), embed("<|vision_end|>")
    head_text, last = f"{prompt}\nrate: ", "\nEND<|im_end|>\n<|im_start|>assistant\n"
    before = [embed("<|im_start|>user\n"), start, features[0], end, start, features[1], end, embed(head_text)]
    row = torch.cat([*before, embed("<|Reward|>"), embed(last)])
    hidden = tiny.model.model.language_model(inputs_embeds=row[None]).last_hidden_state[0, sum(map(len, before))]
    for i in (0, 2, 4):
        hidden = head[i] @ hidden + head[i + 1][:, 0]
        hidden = hidden.relu() if i < 4 else hidden
    return float(hidden[0])


def test_edit_reward_equals_the_network_with_its_two_heads(edit_reward_files):
    options, tiny, draws = edit_reward_files
    with torch.inference_mode():
        want = [expected_rating(tiny, head, f"{i} a cat") for i, head in enumerate(draws, 1)]
    reward = loaded("edit_reward", **options)
    score = score_one(reward, source=SOURCE)
    assert score.parts == {"instruction": pytest.approx(want[0], abs=1e-4), "quality": pytest.approx(want[1], abs=1e-4)}
    assert score.value == pytest.approx(sum(want) / 2, abs=1e-4)
    assert score_one(reward, source=RESULT).value != pytest.approx(score.value, abs=1e-4)
    assert score_one(reward, mask=MASK).failure == "the sample has no source image"


def test_files_that_do_not_fit_edit_reward_are_named(edit_reward_files, tmp_path):
    options, _, _ = edit_reward_files
    with pytest.raises(RewardError, match=r"with_special_token cannot be read .* set the option code to a clone"):
        loaded("edit_reward", **{**options, "code": str(tmp_path / "base")})
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(RewardError, match=r"other.safetensors cannot be loaded: it has no weights model.language"):
        loaded("edit_reward", **{**options, "model": str(tmp_path / "other.safetensors")})


# checks before a run


def test_rewards_that_see_images_need_a_source():
    def check(name, is_local=True, **inputs):
        function = RewardFunction(name=name)
        check_reward_needs(function, [], is_local=is_local, makes_video=False, has_recordings=False, **inputs)

    check("preservation", provided_inputs=["source", "mask"], accepted_inputs=["source"])
    missing = r"^reward preservation needs masks: add data.reward_inputs: \[mask\], or set options.whole: true$"
    with pytest.raises(RecipeError, match=missing):
        check("preservation", provided_inputs=["source"])
    check("preservation", is_local=False, provided_inputs=["source"])  # the service may set whole
    with pytest.raises(RecipeError, match=r"reward preservation needs source: add it to data\.inputs"):
        check("preservation", accepted_inputs=["source"])
    with pytest.raises(RecipeError, match="needs the input source, which this model does not accept"):
        check("preservation", is_local=False)
    seen = [
        may_see_images(RewardFunction(name=name), is_local=is_local)
        for name, is_local in (("edit_judge", True), ("pickscore", False), ("unknown:Class", False), ("color/x", True))
    ]
    assert seen == [True, False, True, False]


def test_a_run_whose_rewards_do_not_see_the_source_causes_a_warning(tmp_path, root, tiny_pipelines, caplog):
    for i in range(8):
        for folder in ("target", "source"):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), 9 * i + len(folder), np.uint8)).save(tmp_path / folder / f"{i}.png")
        (tmp_path / "target" / f"{i}.json").write_text('{"prompt": "brighter"}')
    folders = f"path: {tmp_path}/target, input_folders: {{source: {tmp_path}/source}}"
    data = f"data={{kind: folder, inputs: [source], {folders}}}"
    settings = [data, f"run.output_dir={tmp_path}/out", f"model.path={tiny_pipelines('sd3')}"]
    color, held_out = "reward.functions=[{name: color}]", "validation.held_out_rewards=[{name: %s}]"
    for name, rewards, is_warned in (
        ("ddrl", [color], True),
        ("ddrl", ["reward.functions=[{name: color}, {name: preservation, options: {whole: true}}]"], False),
        ("ddrl", [color, held_out % "preservation, options: {whole: true}"], True),  # not used for training
        ("sft", [held_out % "color"], False),
    ):
        caplog.clear()
        recipe = load_recipe(root / f"tests/recipes/sd3_{name}.yaml", [*settings, *rewards])
        check_rewards(recipe, load_data(recipe))
        assert ("no reward compares samples with their source" in caplog.text) == is_warned
