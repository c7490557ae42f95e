"""Rewards from a vision-language model, over real HTTP to a stub server with OpenAI's API."""

import base64
import io
import json
import math

import av
import numpy as np
import pytest
from PIL import Image

from each_case import check_each
from reward_http import chat_reply as said
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_reward import registry


def judge(name, server, **options):
    return loaded(name, **{"endpoint": f"{server.url}/v1/", "timeout_s": 5.0, **options})


def likely(**logprobs):
    top = [{"token": token.replace("_", " "), "logprob": value} for token, value in logprobs.items()]
    return 200, {"choices": [{"message": {"content": "No"}, "logprobs": {"content": [{"top_logprobs": top}]}}]}


PICTURES = np.random.default_rng(0).integers(0, 256, (2, 8, 10, 3), dtype=np.uint8)
CLIP = np.full((1, 5, 16, 32, 3), 90, np.uint8)


def test_the_final_score_is_divided_by_five_and_the_image_is_lossless(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server.answers = [said("Alignment: good.\nFinal Score: 4.5"), said("Final Score: 1")]
    reward = judge("unified_reward", server, api_key_env="MY_KEY", concurrency=1)
    first, second = reward.score(media_batch(PICTURES, ["a cat", "a dog"]))
    assert (first.value, second.value) == (0.9, 0.2)
    path, headers, body = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    request = json.loads(body)
    assert (request["model"], request["temperature"]) == ("UnifiedReward-7b-v1.5", 0)
    picture, text = request["messages"][0]["content"]
    assert text["text"].endswith("Text Caption: [a cat]")
    data = picture["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) == PICTURES[0]).all()


@check_each(
    ("answer", "says"),
    [
        (said("It is fine."), "the reply has no final score: 'It is fine.'"),
        (said("Final Score: 9"), "the reply has no final score"),
        (said(None), "the reply has no score: TypeError"),
        ((200, {"choices": []}), "the reply has no score: IndexError"),
        ((200, {"error": "x"}), "the reply has no score: KeyError"),
        ((200, b"oops"), "is not JSON: oops"),
        ((404, {"error": "no such model"}), 'responds with 404: {"error": "no such model"}'),
        ((500, b"down"), "responds with 500: down"),
    ],
)
def test_an_answer_without_a_score_is_a_named_failure(server, answer, says):
    server.answers = [answer]
    scores = judge("unified_reward", server, timeout_s=1.0).score(media_batch(PICTURES))
    assert all(says in score.failure for score in scores)


@pytest.mark.parametrize(
    ("top", "value"),
    [
        ({"No": math.log(0.6), "Yes": math.log(0.2)}, 0.75),
        ({"Yes": -0.1, "No": -900.0}, 0.0),
        ({"No": math.log(0.9), "Maybe": math.log(0.1)}, 0.9),
        ({"_Yes": math.log(0.3), "No": math.log(0.3)}, 0.5),
    ],
)
def test_no_anomaly_is_the_probability_of_no(server, top, value):
    server.answers = [likely(**top)]
    (score,) = judge("cosmos_reason1", server).score(media_batch(CLIP, fps=8.0))
    assert score.value == pytest.approx(value, abs=1e-9)
    assert score.parts["no_logprob"] == top["No"]


def test_a_video_is_sent_as_a_file_with_its_speed_and_neither_yes_nor_no_is_a_failure(server):
    server.answers = [likely(Maybe=-0.1, Perhaps=-2.0)]
    (score,) = judge("cosmos_reason1", server).score(media_batch(CLIP, fps=8.0))
    assert score.failure == "neither Yes nor No is among the likely tokens: Maybe, Perhaps"
    request = json.loads(server.requests[0][2])
    assert (request["max_tokens"], request["logprobs"], request["top_logprobs"]) == (1, True, 20)
    assert request["messages"][0]["role"] == "system"
    url = request["messages"][1]["content"][0]["video_url"]["url"]
    with av.open(io.BytesIO(base64.b64decode(url.removeprefix("data:video/mp4;base64,")))) as video:
        assert float(video.streams.video[0].average_rate) == 8.0
        assert sum(1 for _ in video.decode(video=0)) == 5


def test_wrong_settings_are_named(server, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(RewardError, match="the environment variable MY_KEY is not set"):
        judge("unified_reward", server, api_key_env="MY_KEY")
    for options, says in [
        ({"endpoint": "localhost:8000"}, "endpoint is 'localhost:8000'; it must start with http"),
        ({"endpoint": "http://x", "timeout_s": 0}, r"timeout_s must be in \(0, 600\]"),
        ({"endpoint": "http://x", "concurrency": 0}, "concurrency an integer >= 1"),
        ({"endpoint": "http://x", "concurrency": float("nan")}, "concurrency an integer >= 1"),
        ({"endpoint": "http://x", "timeout_s": "long"}, "reward unified_reward: '<' not supported"),
        ({}, "reward unified_reward needs the option endpoint"),
    ]:
        with pytest.raises(RewardError, match=says):
            registry.create_reward("unified_reward", "cpu", options)
