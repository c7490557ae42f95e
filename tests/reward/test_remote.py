"""The reward `remote`, against our own service over real HTTP and against a scripted stub server."""

import io
import json
import math
import time
from types import SimpleNamespace
from urllib.parse import parse_qs

import numpy as np
import pytest

from each_case import check_each
from reward_http import TOKEN, serving, started_client
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.reward_service import build_service_config
from wfm_ds.training.preflight import require_reachable_rewards
from wfm_reward import registry
from wfm_reward.http_client import MAX_RESPONSE_BYTES
from wfm_reward.rewards.remote import IGNORE_REPLICA_VARIABLE, VARIABLE_PREFIXES, read_service_addresses

MOODY = "probe_rewards:Moody"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for family in VARIABLE_PREFIXES:
        for key in ("ENQUEUE_URL", "FETCH_URL", "TOKEN"):
            monkeypatch.delenv(f"{family}_{key}", raising=False)
    monkeypatch.delenv(IGNORE_REPLICA_VARIABLE, raising=False)


def a_batch(prompts, media=None, fps=None, metadata=None):
    if media is None:
        media = np.random.default_rng(0).integers(0, 256, (len(prompts), 8, 8, 3), dtype=np.uint8)
    return media_batch(media, prompts, metadata, fps=fps, reward="remote")


def set_address(monkeypatch, url, enqueue, fetch, token):
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{url}/{enqueue}")
    monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", f"{url}/{fetch}")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", token)


@pytest.fixture
def server(server, monkeypatch):
    set_address(monkeypatch, server.url, "enqueue", "pull", "secret")
    return server


def remote(**options):
    return loaded("remote/pickscore", **{"timeout_s": 5.0, **options})


def scored(server, scores, prompts=("a", "b"), options=None, **more):
    server.answers = [(200, {"uuid": "u-1"}), (200, {"scores": scores, **more})]
    return remote(**(options or {})).score(a_batch(list(prompts)))


# With our own service


@pytest.mark.slow
def test_a_recipe_with_remote_rewards_gets_the_scores_of_the_service(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    config = {"http": {"bind": "127.0.0.1:0", "token_file": "token"}, "rewards": {MOODY: {}, "motion": {}}}
    functions = [
        {"name": f"remote/{MOODY}", "options": {"output": "brightness"}, "max_batch": 4, "workers": 2},
        {"name": "remote/again", "options": {"reward": MOODY, "output": "darkest+brightness"}},
    ]
    prompts = ["fine", "refuse", "fine", "raise", "fine"]
    with serving(tmp_path, config) as (_, said):
        set_address(monkeypatch, said["http"], "api/reward/enqueue", "api/reward/pull", TOKEN)
        with started_client(tmp_path / "run", *functions) as client:
            batch = a_batch(prompts)
            client.submit(batch)
            scores = client.wait()
        video = np.zeros((1, 3, 8, 8, 3), np.uint8)
        video[:, 1] = 255
        reward = loaded("remote/motion")
        assert [s.value for s in reward.score(a_batch(["x"], video, fps=8.0))] == [1.0]
        monkeypatch.setenv("REMOTE_REWARD_TOKEN", "wrong")
        reward.load()
        with pytest.raises(RewardError, match=r"rejects the token \(401\): .*the token is wrong"):
            reward.score(a_batch(["x"], video, fps=8.0))
    for i, prompt in enumerate(prompts):
        first, second = (scores[f"s{i}"][f["name"]] for f in functions)
        if prompt == "fine":
            mean, least = batch.media[i].mean() / 255, float(batch.media[i].min())
            assert first.value == pytest.approx(mean)
            assert first.parts == {"brightness": pytest.approx(mean), "darkest": least}
            assert second.value == pytest.approx(mean + least)
        else:
            why = {"refuse": "nothing to see", "raise": "RuntimeError: this picture is unbearable"}[prompt]
            assert (first.failure, second.failure) == (why, why)


# Requests


def test_images_and_their_token_are_sent_as_the_protocol_says(server):
    batch = a_batch(["a cat", "caf\u00e9"], metadata=[{"tag": "colors", "include": [{"class": "cat"}]}] * 2)
    server.answers = [(200, {"uuid": "u-1", "replica_id": "r7"}), (400, {}), (200, {"scores": {"pickscore": [1, 0.5]}})]
    assert [s.value for s in remote().score(batch)] == [1.0, 0.5]
    (path, headers, body), *pulls = server.requests
    assert path == "/enqueue"
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Content-Type"] == "application/octet-stream"
    line, _, array = body.partition(b"\n")
    fields = json.loads(line)
    assert fields["prompts"] == ["a cat", "caf\u00e9"]
    assert (fields["reward_fn"], fields["media_type"]) == ({"pickscore": 1.0}, "image")
    assert fields["geneval_tags"] == ["colors"] * 2
    assert [json.loads(text) for text in fields["geneval_includes"]] == [[{"class": "cat"}]] * 2
    assert (np.load(io.BytesIO(array)) == batch.media).all()
    assert len(pulls) == 2
    for path, headers, body in pulls:
        assert (path, headers["Authorization"]) == ("/pull", "Bearer secret")
        assert headers["X-Lepton-Replica-Target"] == "r7"
        assert parse_qs(body.decode()) == {"uuid": ["u-1"], "type": ["pickscore"]}


def test_a_variable_disables_the_sticky_replica(server, monkeypatch):
    monkeypatch.setenv(IGNORE_REPLICA_VARIABLE, "1")
    server.answers = [(200, {"uuid": "u-1", "replica_id": "r7"}), (200, {"scores": {"pickscore": [1]}})]
    assert remote().score(a_batch(["a"]))[0].value == 1.0
    assert "X-Lepton-Replica-Target" not in server.requests[1][1]


def test_videos_are_sent_channels_first_with_their_frame_rate(server):
    video = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5, 3), dtype=np.uint8)
    server.answers = [(200, {"uuid": "u"}), (200, {"scores": {"x": [1, 2]}})]
    remote().score(a_batch(["a", "b"], video, fps=16.0))
    line, _, array = server.requests[0][2].partition(b"\n")
    assert json.loads(line)["video_infos"] == [{"video_fps": 16.0}] * 2
    assert json.loads(line)["media_type"] == "video"
    assert (np.load(io.BytesIO(array)) == video.transpose(0, 4, 1, 2, 3)).all()


# Responses


def test_the_score_can_be_a_sum_of_outputs(server):
    outputs = {"vq_reward": [1.0, 2.0], "mq_reward": [10.0, 20.0], "prediction": ["Good", "Bad"]}
    first, second = scored(server, outputs, options={"output": "vq_reward + mq_reward"})
    assert (first.value, second.value) == (11.0, 22.0)
    assert first.parts == {"vq_reward": 1.0, "mq_reward": 10.0}


def test_null_and_nan_are_failures_with_their_reason_if_there_is_one(server):
    first, second, third = scored(
        server, {"x": [None, math.nan, 3.0]}, ("a", "b", "c"), failures=[{"index": 0, "reason": "too dark"}]
    )
    assert first.failure == "too dark"
    assert second.failure == "the service returned no x for this item"
    assert third.value == 3.0


def test_minus_one_for_all_outputs_is_a_failed_video(server):
    server.answers = [(200, {"uuid": "u"}), (200, {"scores": {"a": [-1.0], "b": [-1.0]}})]
    (video,) = remote(output="a").score(a_batch(["x"], np.zeros((1, 2, 4, 4, 3), np.uint8), fps=8.0))
    assert video.failure.startswith("the service returned -1 for all outputs")
    assert scored(server, {"a": [-1.0]}, "x")[0].value == -1.0


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([(200, {"uuid": "u"}), (400, {"message": "Not found scores"})], "no scores within 1.2 s: {"),
        ([(422, {"message": "unknown reward"})], 'a response with status 422: {"message": "unknown reward"}'),
        ([(500, b"oops")], "responds with 500: oops"),
        ([(200, b"<html>")], "a response with status 200 is not JSON: <html>"),
        ([(200, [])], "a response with status 200 is not a JSON object"),
        ([(200, {})], "returned no uuid"),
        ([(302, b"")], "a response with status 302"),
        ([(200, b"x" * (MAX_RESPONSE_BYTES + 1))], "a response of more than"),
    ],
)  # fmt: skip
def test_a_service_that_does_not_answer_fails_the_items_by_name(server, answers, says):
    server.answers = answers
    first, second = remote(timeout_s=1.2).score(a_batch(["a", "b"]))
    assert says in first.failure
    assert first.failure == second.failure
    assert "secret" not in first.failure
    assert all(path != "/elsewhere" for path, _, _ in server.requests)


def test_a_request_to_a_busy_service_is_repeated(server):
    server.answers = [(503, {}), (200, {"uuid": "u"}), (502, b""), (200, {"scores": {"x": [4.0]}})]
    assert remote().score(a_batch(["a"]))[0].value == 4.0


def test_an_unreachable_service_is_a_failure_and_an_error_of_checks(server, monkeypatch):
    recipe = RewardRecipe(functions=[{"name": "remote/x"}])
    registry.create_reward("remote/x", "cpu", {}).check_reachable()
    assert server.requests == [], "a check asks for no scores"
    for variable in ("REMOTE_REWARD_FETCH_URL", "REMOTE_REWARD_ENQUEUE_URL"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1/somewhere")
        with pytest.raises(
            RewardError, match=r"remote/x: cannot connect to http://127\.0\.0\.1:1/.*Connection refused"
        ):
            require_reachable_rewards(SimpleNamespace(all_reward_settings=recipe))
    reward = remote(timeout_s=600)
    reward.deadline_s = time.monotonic() + 0.8  # fails before the worker counts as hung and before the run's deadline
    assert "Connection refused" in reward.score(a_batch(["a"]))[0].failure


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({"a": [1, 2], "b": [1, 2]}, "has the outputs a, b; set the option `output`"),
        ({"a": [1]}, "1 scores for 2 items"),
        ({"a": ["Good", "Bad"]}, "has the outputs ; set"),
        (None, "the service returned no scores"),
    ],
)
def test_scores_that_do_not_fit_the_recipe_are_an_error(server, scores, says):
    with pytest.raises(RewardError, match=says):
        scored(server, scores)


# Service URL and token


def variables(family, url="http://h", token="t"):
    return {f"{family}_ENQUEUE_URL": f"{url}/e", f"{family}_FETCH_URL": f"{url}/f", f"{family}_TOKEN": token}


@check_each("family", VARIABLE_PREFIXES)
def test_each_family_of_variables_is_read(family):
    assert read_service_addresses(variables(family)) == ("http://h/e", "http://h/f", "t")


def test_the_variables_must_be_complete_and_agree():
    first, second, third = VARIABLE_PREFIXES
    for same in (variables(third), {"WFM_REWARD_TOKEN": "of our own service"}):
        assert read_service_addresses(variables(first) | same) == ("http://h/e", "http://h/f", "t")
    for environment, says in (
        (variables(first) | variables(second, "http://other"), "prefixes REMOTE_REWARD and WFM_REWARD differ"),
        ({"WFM_REWARD_ENQUEUE_URL": "http://h"}, "WFM_REWARD_ENQUEUE_URL is set, but not WFM_REWARD_FETCH_URL"),
        ({}, "set REMOTE_REWARD_ENQUEUE_URL"),
        (variables(first, "ftp://h"), "'ftp://h/e'; it must start with http"),
    ):
        with pytest.raises(RewardError, match=says):
            read_service_addresses(environment)


def test_a_worker_that_waits_for_a_service_does_not_count_as_hung(tmp_path):
    recipe = RewardRecipe(functions=[{"name": "remote/x"}, {"name": "color"}], timeout_s=500)
    config = build_service_config(recipe, tmp_path)
    assert config["rewards"]["remote/x"]["stall_s"] == 500
    assert config["rewards"]["color"]["stall_s"] == 120
    with pytest.raises(RewardError, match="timeout_s is 601"):
        registry.create_reward("remote/x", "cpu", {"timeout_s": 601})
