"""Rewards from models with their own packages, tested with stubs of the packages' interfaces."""

import io
import sys
import types

import av
import numpy as np
import pytest
import torch

from each_case import check_each
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_reward import registry
from wfm_reward.rewards._scene import COLORS, DetectedObject, find_metadata_problem, score_scene, spatial_relations
from wfm_reward.rewards._vlm import encode_mp4
from wfm_reward.rewards.geneval import Detector, GenEval, _crop_object


def pictures(count):
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def package(monkeypatch, name, **contents):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


# image_reward, hpsv3


def test_image_reward_equals_the_packages_score(monkeypatch):
    seen = []

    class Model:
        def eval(self):
            return self

        def score(self, prompt, image):
            seen.append((prompt, image.size))
            return len(prompt) + 0.5

    package(monkeypatch, "ImageReward", load=lambda name, device, **more: seen.append((name, device, more)) or Model())
    reward = loaded("image_reward", med_config="/m.json")
    scores = reward.score(media_batch(pictures(2), ["a", "bcd"]))
    assert [s.value for s in scores] == [1.5, 3.5]
    assert seen == [("ImageReward-v1.0", "cpu", {"med_config": "/m.json"}), ("a", (8, 8)), ("bcd", (8, 8))]


def test_hpsv3_is_the_mean_and_its_std_is_a_part(monkeypatch):
    class Inferencer:
        rows = torch.tensor([[9.5, 0.25], [7.25, 0.5]], dtype=torch.bfloat16)

        def __init__(self, **settings):
            assert settings == {"device": "cpu", "checkpoint_path": "/h.safetensors"}

        def reward(self, prompts, image_paths):
            assert prompts == ["a", "b"]
            assert [image.size for image in image_paths] == [(8, 8)] * 2
            return self.rows

    package(monkeypatch, "hpsv3", HPSv3RewardInferencer=Inferencer)
    reward = loaded("hpsv3", checkpoint="/h.safetensors")
    batch = media_batch(pictures(2), ["a", "b"])
    assert [(s.value, s.parts) for s in reward.score(batch)] == [(9.5, {"sigma": 0.25}), (7.25, {"sigma": 0.5})]
    Inferencer.rows = torch.tensor([[9.5, 0.25]])
    with pytest.raises(RewardError, match="for 2 images, not two numbers per image"):
        reward.score(batch)


@check_each("name", ["image_reward", "hpsv3", "video_align", "dance_grpo"])
def test_a_missing_package_is_named(name, monkeypatch):
    for module in ("ImageReward", "hpsv3", "fastvideo"):
        monkeypatch.setitem(sys.modules, module, None)
    reward = registry.create_reward(name, "cpu", {})
    with pytest.raises(RewardError, match=f"reward {name} needs a package that is not installed"):
        reward.load()


# video_align, dance_grpo


class VideoInference:
    """Stub of VideoAlign's class; reads the given files like the original."""

    def __init__(self, folder, device, dtype):
        assert (folder, device, dtype) == ("KwaiVGI/VideoReward", "cpu", torch.bfloat16)

    def reward(self, paths, prompts, use_norm):
        assert use_norm
        answers = []
        for path, prompt in zip(paths, prompts, strict=True):
            with av.open(path) as video:
                fps = float(video.streams.video[0].average_rate)
                frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
            vq, mq, ta = float(np.mean(frames)), fps + len(frames) / 100, float(len(prompt))
            answers.append({"VQ": vq, "MQ": mq, "TA": ta, "Overall": vq + mq + ta})
        return answers


def a_video(level, frames=6):
    return np.full((1, frames, 32, 48, 3), level, np.uint8)


@pytest.mark.parametrize("name", ["video_align", "dance_grpo"])
def test_video_align_rates_the_clip_with_its_speed_and_prompt(monkeypatch, name):
    package(monkeypatch, "fastvideo.models.videoalign.inference", VideoVLMRewardInference=VideoInference)
    reward = loaded(name)
    media = np.concatenate([a_video(40), a_video(200)])
    scores = reward.score(media_batch(media, ["a", "bcd"], fps=12.0))
    for score, level, words in zip(scores, (40, 200), (1, 3), strict=True):
        parts = dict(score.parts)
        assert parts["vq_reward"] == pytest.approx(level, abs=2)
        assert parts["mq_reward"] == pytest.approx(12.06)
        assert parts["ta_reward"] == words
        assert score.value == pytest.approx(sum(parts[f"{part}_reward"] for part in ("vq", "mq", "ta")))
        assert ("overall_reward" in parts) == (name == "video_align"), "there it is the primary output's own name"
    with pytest.raises(RewardError, match="frames per second"):
        reward.score(media_batch(media))


def test_video_align_takes_a_sum_of_outputs_and_a_checkout(monkeypatch, tmp_path):
    (tmp_path / "inference.py").write_text(
        "class VideoVLMRewardInference:\n"
        "    def __init__(self, folder, device, dtype): pass\n"
        "    def reward(self, paths, prompts, use_norm): return [dict(VQ=1., MQ=2., TA=4., Overall=7.)] * len(paths)\n"
    )
    monkeypatch.delitem(sys.modules, "inference", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward = loaded("dance_grpo", output="vq_reward + mq_reward", code=str(tmp_path))
    (score,) = reward.score(media_batch(a_video(0), fps=8.0))
    assert (score.value, score.parts) == (3.0, {"vq_reward": 1.0, "mq_reward": 2.0, "ta_reward": 4.0})
    sys.modules.pop("inference", None)
    with pytest.raises(RewardError, match="output is 'vq'; it must be a sum of overall_reward, vq_reward"):
        registry.create_reward("dance_grpo", "cpu", {"output": "vq"})


def test_a_clip_file_is_nearly_lossless():
    frames = np.zeros((5, 33, 47, 3), np.uint8)
    frames[:, :16] = (200, 40, 90)
    with av.open(io.BytesIO(encode_mp4(frames, 12.5))) as video:
        assert float(video.streams.video[0].average_rate) == 12.5
        read = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    assert read.shape == (5, 32, 46, 3)
    assert np.abs(read.astype(int) - frames[:, :32, :46]).mean() < 3


# gen_eval


def one(name, box, confidence=0.99, mask=None):
    return DetectedObject(name, box, confidence, mask)


LEFT, RIGHT, BELOW = (0, 0, 10, 10), (30, 0, 40, 10), (0, 30, 10, 40)


@check_each(
    ("a", "b", "want"),
    [
        (LEFT, RIGHT, {"left of"}), (RIGHT, LEFT, {"right of"}), (BELOW, LEFT, {"below"}), (LEFT, BELOW, {"above"}),
        (RIGHT, BELOW, {"right of", "above"}), (LEFT, (1, 1, 11, 11), set()), (LEFT, LEFT, set()),
    ],
)  # fmt: skip
def test_where_an_object_is(a, b, want):
    assert spatial_relations(one("x", a), one("y", b)) == want


def verdict(objects, include, exclude=(), colors=()):
    by_name = {}
    for found in objects:
        by_name.setdefault(found.name, []).append(found)
    return score_scene(by_name, include, list(exclude), lambda name, some: list(colors)[: len(some)])


CATS = [one("cat", LEFT), one("cat", RIGHT)]
TWO_CATS, ONE_CAT = {"class": "cat", "count": 2}, {"class": "cat", "count": 1}


def test_counts_are_graded_by_how_far_off_they_are():
    for number, soft in ((0, 0.0), (1, 0.5), (2, 1.0), (3, 0.5), (5, -0.5)):
        got = verdict([one("cat", LEFT)] * number, [TWO_CATS])
        assert (got.soft, got.correct, got.strict) == (soft, number >= 2, number == 2), number


def test_colours_count_and_a_wrong_number_of_objects_makes_them_wrong():
    clause = [TWO_CATS | {"color": "red"}]
    assert verdict(CATS, clause, colors=["red", "red"]).soft == 1.0
    got = verdict(CATS, clause, colors=["red", "blue"])
    assert (got.soft, got.correct, got.strict) == ((1 + 0.5) / 2, False, False)
    assert verdict(CATS[:1], clause, colors=["red"]).soft == (0.5 + 0.0) / 2


def test_positions_are_of_the_clause_that_they_name():
    dog = {"class": "dog", "count": 1, "position": ["right of", 0]}
    there, wrong = one("dog", RIGHT), one("dog", BELOW)
    assert verdict([CATS[0], there], [ONE_CAT, dog]) == verdict([CATS[0]], [ONE_CAT])
    got = verdict([CATS[0], wrong], [ONE_CAT, dog])
    assert (got.soft, got.correct) == (pytest.approx(2 / 3), False)
    got = verdict([there], [ONE_CAT, dog])
    assert (got.soft, got.correct) == (pytest.approx(1 / 3), False), "there is no cat to be right of"


def test_excluded_objects_fail_only_the_strict_score():
    got = verdict(CATS, [TWO_CATS], [{"class": "cat", "count": 3}])
    assert (got.soft, got.correct) == (1.0, True)
    got = verdict([*CATS, CATS[0]], [TWO_CATS], [{"class": "cat", "count": 3}])
    assert (got.soft, got.correct) == (0.5, False)


@check_each(
    ("metadata", "says"),
    [
        ({"include": []}, "`include` is not a list of clauses"),
        ({"include": [{"class": "cat"}]}, "a clause without class and count"),
        ({"include": [{"class": "cat", "count": 0}]}, "a clause without class and count"),
        ({"include": [ONE_CAT], "exclude": 3}, "`exclude` is not a list"),
        ({"include": [ONE_CAT | {"color": "mauve"}]}, "unknown colour 'mauve'; it must be one of red"),
        ({"include": [ONE_CAT, ONE_CAT | {"position": ["above", 1]}]}, "does not refer to an earlier clause"),
        ({"include": [ONE_CAT, ONE_CAT | {"position": ["above", 0]}]}, ""),
    ],
)
def test_questions_that_make_no_sense_are_named(metadata, says):
    assert says in find_metadata_problem(metadata)
    assert bool(find_metadata_problem(metadata)) == bool(says)


class PaintedCats(Detector):
    """Detects a cat in each half that is not grey: with confidence 0.95 on the left and 0.6 on the right."""

    def load(self):
        assert (self.model, self.device) == ("none", "cpu")

    def detect_objects(self, image):
        found = []
        for x, confidence in ((0, 0.95), (16, 0.6)):
            mask = np.zeros(image.shape[:2], bool)
            mask[:, x : x + 16] = (image[:, x : x + 16] != 128).any(axis=-1)
            if mask.any():
                found.append(DetectedObject("cat", (x, 0, x + 16, 16), confidence, mask))
        return found


@pytest.fixture
def gen_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "painted", types.SimpleNamespace(PaintedCats=PaintedCats, Detector=Detector))
    reward = registry.create_reward("gen_eval", "cpu", {"detector": "painted:PaintedCats", "detector_model": "none"})

    class Colours:
        """Replaces CLIP: embeds images by mean colour and texts by colour word."""

        rgb = {"red": (1, 0, 0), "blue": (0, 0, 1), "green": (0, 1, 0)}  # noqa: RUF012

        def embed_images(self, images):
            means = [np.asarray(image).reshape(-1, 3).mean(axis=0) for image in images]
            return torch.nn.functional.normalize(torch.tensor(np.array(means), dtype=torch.float32), dim=-1)

        def embed_texts(self, texts):
            words = [next(word for word in COLORS if f" {word}" in text) for text in texts]
            return torch.tensor([self.rgb.get(word, (-1, -1, -1)) for word in words], dtype=torch.float32)

    monkeypatch.setattr("wfm_reward.rewards._clip.ClipModel", lambda *_: Colours())
    reward.load()
    return reward


def painted(left, right=(128, 128, 128)):
    image = np.zeros((1, 16, 32, 3), np.uint8)
    image[:, :, :16], image[:, :, 16:] = left, right
    return image


def test_gen_eval_asks_detector_and_clip(gen_eval):
    include = [{"class": "cat", "count": 2, "color": "red"}]
    metadata = [{"tag": "colors", "include": include}]
    (score,) = gen_eval.score(media_batch(painted((255, 0, 0), (250, 0, 0)), metadata=metadata))
    assert (score.value, score.parts) == (1.0, {"gen_eval_score": 1.0, "gen_eval_strict": 1.0})
    (score,) = gen_eval.score(media_batch(painted((255, 0, 0), (0, 0, 255)), metadata=metadata))
    assert (score.value, score.parts) == (0.75, {"gen_eval_score": 0.0, "gen_eval_strict": 0.0})


def test_gen_eval_counts_only_what_is_sure_where_it_counts(gen_eval):
    image = painted((255, 0, 0), (255, 0, 0))
    for tag, soft in (("single_object", 1.0), ("counting", 0.5)):
        metadata = [{"tag": tag, "include": [TWO_CATS]}]
        assert gen_eval.score(media_batch(image, metadata=metadata))[0].value == soft
    (score,) = gen_eval.score(media_batch(image, metadata=[{"tag": "x", "include": 3}]))
    assert score.failure == "the metadata `include` is not a list of clauses"


def test_objects_are_cropped_to_the_box_on_a_grey_background():
    image = painted((255, 0, 0), (0, 0, 255))[0]
    mask = np.zeros((16, 32), bool)
    mask[4:8, 4:20] = True
    cut = np.asarray(_crop_object(image, DetectedObject("cat", (4, 2, 20, 8), 1.0, mask)))
    assert cut.shape == (6, 16, 3)
    assert (cut[:2] == 153).all()
    assert (cut[2:, :12] == (255, 0, 0)).all()


def test_an_invalid_detector_is_named():
    with pytest.raises(RewardError, match="no class 'Reward' that is a subclass of"):
        GenEval("cpu", detector="wfm_reward.base:Reward")
