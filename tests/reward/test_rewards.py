"""Built-in rewards on real images: scores are compared with their definitions; all other inputs fail by name."""

import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from each_case import check_each
from reward_samples import loaded, media_batch
from wfm_ds.demos.digits_data import reward_split, sft_split
from wfm_ds.errors import RewardError
from wfm_reward import registry
from wfm_reward.rewards.ocr import edit_distance

FOR_IMAGES = {"color", "digits", "jpeg_compressibility", "jpeg_incompressibility", "ocr"}
FOR_IMAGES |= {"pickscore", "clipscore", "aesthetic", "hpsv2", "hpsv3", "image_reward", "gen_eval", "unified_reward"}
FOR_IMAGES |= {"preservation", "edit_judge", "edit_reward", "edited_digits", "seen_edited_digits"}
FOR_VIDEOS = {"clap", "sound_match", "moving", "nearest_clip", "motion", "video_align", "dance_grpo", "cosmos_reason1"}
FOR_VIDEOS |= {"action_following", "brightness", "camera_following", "consistency", "continuation", "seen_action"}
BUILT_IN = FOR_IMAGES | FOR_VIDEOS | {"mock", "remote"}
NEEDED = {  # options without a default
    "camera_following": {"url": "http://127.0.0.1:8000"},
    "edit_judge": {"endpoint": "http://127.0.0.1:8000/v1", "model": "m"},
    "edit_reward": {"code": "/code"},
    "remote": {"reward": "pickscore"},
    "unified_reward": {"endpoint": "http://127.0.0.1:8000/v1"},
    "cosmos_reason1": {"endpoint": "http://127.0.0.1:8000/v1"},
}


def score(reward, images, prompts=None, metadata=None):
    """Score images of one size and run the checks that every reward must pass."""
    batch = media_batch(np.stack(images), prompts or [""] * len(images), metadata, reward=reward.name)
    scores = reward.score(batch)
    assert [(s.sample_id, s.reward) for s in scores] == [(i, reward.name) for i in batch.sample_ids]
    for one in scores:
        assert one.value is None or one.value in reward.outputs[reward.primary_output]
        assert all(part in reward.outputs[key] for key, part in one.parts.items())
    return scores


def flat(color, size=16):
    return np.full((size, size, 3), color, np.uint8)


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def drawn(text, height=128, width=384, font_size=48, ink="black", paper="white"):
    image = Image.new("RGB", (width, height), paper)
    ImageDraw.Draw(image).text((20, 30), text, fill=ink, font=ImageFont.load_default(font_size))
    return np.asarray(image)


# --- all rewards


def test_the_built_in_rewards_are_found_and_describe_themselves():
    assert set(registry.list_reward_names()) == BUILT_IN
    for name in BUILT_IN:
        reward = registry.get_reward_class(name)
        assert reward.primary_output in reward.outputs
        assert reward.media_types == (
            {"image"} if name in FOR_IMAGES else {"video"} if name in FOR_VIDEOS else {"image", "video"}
        )


@check_each("name", sorted(BUILT_IN))
def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(RewardError, match=f"{name} has no option qualty"):
        registry.create_reward(name, "cpu", {"qualty": 3, **NEEDED.get(name, {})})


def test_finding_and_describing_rewards_loads_no_model_library():
    heavy = ("torch", "sklearn", "onnxruntime", "rapidocr_onnxruntime", "cv2", "PIL")
    code = (
        "import sys\nfrom wfm_reward import registry\n"
        f"for name in registry.list_reward_names(): registry.create_reward(name, 'cpu', {NEEDED}.get(name, {{}}))\n"
        f"loaded = [m for m in {heavy} if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- motion


def motion_of(video):
    (one,) = score(loaded("motion"), [video])
    return one


def test_motion_is_the_mean_difference_of_neighbouring_frames():
    levels = np.array([0, 255, 204, 204], np.uint8)
    video = np.broadcast_to(levels[:, None, None, None], (4, 6, 5, 3))
    assert motion_of(video).value == pytest.approx((255 + 51 + 0) / 255 / 3)
    rng = np.random.default_rng(0)
    random = rng.integers(0, 256, (7, 9, 8, 3), dtype=np.uint8)
    assert motion_of(random).value == pytest.approx(np.abs(np.diff(random.astype(float), axis=0)).mean() / 255)
    assert motion_of(random[::-1]).value == pytest.approx(motion_of(random).value)


def test_a_still_video_has_no_motion_and_one_frame_fails():
    still = np.repeat(noise(16)[None], 5, axis=0)
    assert motion_of(still).value == 0.0
    assert motion_of(still[:1]).failure == "a video of one frame has no motion"


# --- digits


@pytest.fixture(scope="module")
def digits():
    return loaded("digits")


def as_rgb(grey):
    return np.repeat(grey[..., None], 3, axis=-1)


def features(grey):
    """Return 2 * gray - 1 in float64, with gray in [0, 1]."""
    return 2.0 * grey.reshape(len(grey), -1).astype(np.float64) / 255.0 - 1.0


def test_both_classifiers_recognize_digits_that_they_were_not_fitted_to(digits):
    for (images, labels), part in ((sft_split(), "digits"), (reward_split(), "second_judge")):
        scores = score(digits, as_rgb(images), metadata=[{"label": int(d)} for d in labels])
        read = [s.value if part == "digits" else s.parts[part] for s in scores]
        assert set(read) == {0.0, 1.0}
        assert 0.98 < np.mean(read) < 1.0  # 1.0 would mean that it was fitted on these digits


def test_the_classifiers_are_fitted_to_separate_halves(digits):
    """Judges fitted here on the splits of wfm_ds agree with the reward on noisy images, which are new to all judges."""
    (even, even_labels), (odd, odd_labels) = sft_split(), reward_split()
    judge = SVC(gamma=0.1, C=10).fit(features(odd), odd_labels)
    second = KNeighborsClassifier(3).fit(features(even), even_labels)
    noisy = even[:200] + np.random.default_rng(0).normal(0, 60, (200, 8, 8))
    shaken = np.clip(noisy, 0, 255).astype(np.uint8)
    for digit in (1, 8):
        scores = score(digits, as_rgb(shaken), metadata=[{"label": digit}] * len(shaken))
        assert [s.value for s in scores] == list((judge.predict(features(shaken)) == digit).astype(float))
        seconds = [s.parts["second_judge"] for s in scores]
        assert seconds == list((second.predict(features(shaken)) == digit).astype(float))


@check_each(("height", "width"), [(32, 32), (16, 40), (64, 8)])
def test_larger_images_are_averaged_cell_by_cell(digits, height, width):
    """Noise that averages out in each cell hides the digit from a reward that samples single pixels."""
    images, labels = sft_split()
    images, labels = images[:60] // 2 + 64, labels[:60]  # 64 to 191, so that noise does not clip
    down, across = height // 8, width // 8
    big = images.repeat(down, axis=1).repeat(across, axis=2).astype(int)
    checker = np.indices(big.shape[1:]).sum(axis=0) % 2 * 2 - 1
    if down * across % 2 == 0:
        big = big + 60 * checker
    metadata = [{"label": int(d)} for d in labels]
    large, small = (score(digits, as_rgb(some.astype(np.uint8)), metadata=metadata) for some in (big, images))
    assert large == small


@check_each("label", [None, "7", 7.0, 10, -1, True])
def test_a_label_that_is_no_digit_and_a_small_image_are_failures(digits, label):
    metadata = [{} if label is None else {"label": label}]
    (one,) = score(digits, [flat(0, 8)], metadata=metadata)
    assert one.failure == f"the metadata `label` is {label!r}, not a digit from 0 to 9"
    (small,) = score(digits, [flat(0, 7)], metadata=[{"label": 1}])
    assert small.failure == "the image is 7 x 7, smaller than 8 x 8"


# --- jpeg


def test_jpeg_rewards_are_the_size_in_kb_and_its_negative_over_500():
    images = [noise(64), flat((10, 200, 30), 64), drawn("HELLO 42", 64, 64)]
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        sizes.append(len(buffer.getvalue()))
    assert sizes[0] > sizes[2] > sizes[1]
    rich = [s.value for s in score(loaded("jpeg_incompressibility"), images)]
    plain = [s.value for s in score(loaded("jpeg_compressibility"), images)]
    assert rich == [size / 1000 for size in sizes]
    assert plain == pytest.approx([-size / 500_000 for size in sizes], rel=1e-12)


# --- color


def test_color_is_one_minus_the_mean_distance():
    half = flat(0)
    half[:, :8] = 255
    images = [flat((255, 0, 0)), flat((255, 0, 0)), half, flat((10, 20, 30))]
    targets = [[255, 0, 0], [0, 255, 255], [255, 255, 255], (20.5, 20, 0)]
    prompts = ["a green ball"] * 4  # metadata go before the prompt
    values = [s.value for s in score(loaded("color"), images, prompts, [{"target_rgb": t} for t in targets])]
    assert values == pytest.approx([1.0, 0.0, 0.5, 1 - 40.5 / 3 / 255], abs=1e-12)


def test_the_first_colour_word_of_the_prompt_is_the_target():
    colors = {
        "a RED circle on white": (255, 0, 0),
        "white": (255, 255, 255),
        "The black, not the blue one": (0, 0, 0),
        "green.": (0, 255, 0),
        "deep-blue sea": (0, 0, 255),
        "redder than yellow": (255, 255, 0),
    }
    scores = score(loaded("color"), [flat(rgb) for rgb in colors.values()], prompts=list(colors))
    assert [s.value for s in scores] == [1.0] * len(colors)
    (one,) = score(loaded("color"), [flat(0)], ["a tired blueprint"])
    assert one.failure.startswith("no target_rgb in the metadata and none of white, black")


@check_each("target", [[1, 2], [1, 2, 256], [-1, 0, 0], "red", [True, 0, 0], 255, [float("nan"), 0, 0]])
def test_a_target_that_is_no_colour_is_a_failure(target):
    (one,) = score(loaded("color"), [flat(0)], ["a red ball"], [{"target_rgb": target}])
    assert one.failure == f"the metadata `target_rgb` is {target!r}, not three numbers from 0 to 255"


# --- ocr


@pytest.fixture(scope="module")
def ocr():
    """The reward with its real model, which takes about a second per image. It reads equal images a single time."""
    reward, texts = loaded("ocr"), {}
    read_text = reward._read_text

    def read_once(image):
        key = image.shape, image.tobytes()
        if key not in texts:
            texts[key] = read_text(image)
        return texts[key]

    reward._read_text = read_once
    return reward


def test_correct_text_scores_1(ocr):
    hello = drawn("HELLO 42")
    prompts = ['a sign that says "hello 42"', "", 'says "Hello  42" not "bye"', 'says "bye"']
    metadata = [{}, {"ocr_target": "HELLO 42"}, {}, {"ocr_target": "ELLO4"}]  # the last: metadata first, substring
    scores = score(ocr, [hello] * 4, prompts, metadata)
    assert [s.value for s in scores] == [1.0] * 4


def test_wrong_letters_lower_the_score_and_no_text_scores_0(ocr):
    images = [*[drawn("HELLO 42")] * 3, flat(255, 128).repeat(3, axis=1), noise(128).repeat(3, axis=1)]
    targets = ["HELLO 43", "JELLO 49", "XYZ", "HELLO", "HELLO"]
    scores = score(ocr, images, metadata=[{"ocr_target": t} for t in targets])
    assert [s.value for s in scores] == pytest.approx([6 / 7, 5 / 7, 0.0, 0.0, 0.0])
    (small,) = score(ocr, [flat(0, 8)], metadata=[{"ocr_target": "a"}])
    assert small.value == 0.0


def test_lines_are_read_from_top_to_bottom(ocr):
    image = np.concatenate([drawn("WORLD", 100), drawn("MODEL", 100)])
    scores = score(ocr, [image, image], metadata=[{"ocr_target": "world model"}, {"ocr_target": "model world"}])
    assert scores[0].value == 1.0
    assert scores[1].value < 1.0


@check_each(
    ("prompt", "metadata"), [("no quotes", {}), ('empty ""', {}), ('"a"', {"ocr_target": " "}), ("", {"ocr_target": 3})]
)
def test_a_prompt_without_a_target_text_is_a_failure(ocr, prompt, metadata):
    (one,) = score(ocr, [flat(255)], [prompt], [metadata])
    assert one.failure == "no ocr_target in the metadata and no text in double quotes in the prompt"


def test_ocr_needs_its_package_and_runs_on_the_cpu_with_at_least_one_thread(monkeypatch):
    with pytest.raises(RewardError, match="runs on the CPU, not on cuda:0"):
        registry.create_reward("ocr", "cuda:0", {})
    with pytest.raises(RewardError, match="threads is 0"):
        registry.create_reward("ocr", "cpu", {"threads": 0})
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(RewardError, match=r"rapidocr-onnxruntime .*pip install 'wfm_ds\[reward-ocr\]'"):
        loaded("ocr")


TEXT = st.text("abc", max_size=7)


def recursive_distance(a, b):
    """Levenshtein distance by its recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return recursive_distance(a[1:], b[1:])
    return 1 + min(recursive_distance(a[1:], b), recursive_distance(a, b[1:]), recursive_distance(a[1:], b[1:]))


@settings(max_examples=100, deadline=None)
@given(a=TEXT, b=TEXT)
def test_edit_distance_equals_the_recursive_definition(a, b):
    assert edit_distance(a, b) == recursive_distance(a, b)


def test_mock_scores_depend_only_on_the_media_and_are_uniform():
    reward = loaded("mock")
    pictures = [noise(8, seed) for seed in range(500)]
    values = [s.value for s in score(reward, pictures)]
    again = score(reward, pictures[::-1], prompts=["another"] * 500)
    assert [s.value for s in again] == values[::-1]
    assert score(reward, [pictures[0].reshape(4, 16, 3)])[0].value != values[0]
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert ((counts - 50) ** 2 / 50).sum() < 27.9  # chi-square, 99.9 % quantile, 9 degrees of freedom
