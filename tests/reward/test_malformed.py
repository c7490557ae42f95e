"""Seeded malformed requests and damaged media: the client gets an error message and the service keeps running."""

import base64
import json

import pytest

import malformed
from reward_http import TOKEN, Http, serving
from wfm_reward.web.json_protocol import parse_compute
from wfm_reward.web.request_body import MemoryBudget, Reservation
from wfm_reward.web.requests import HttpProblem

REWARD = "jpeg_incompressibility"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("malformed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WFM_REWARD_TOKEN", TOKEN)
        config = {"http": {"bind": "127.0.0.1:0", "pull_wait_s": 0}, "rewards": {REWARD: {}}}
        with serving(folder, config) as (_, said):
            yield said["http"], folder / "service.log"


@pytest.mark.parametrize("count", [300, pytest.param(2300, marks=pytest.mark.slow)])
def test_no_malformed_request_is_the_services_error(service, count):
    url, log = service
    counts, failed = malformed.statuses(url, TOKEN, malformed.requests(count, count, REWARD))
    assert failed == []
    assert counts.total() == count
    assert sum(number for status, number in counts.items() if 400 <= status < 500) > count / 2, counts
    assert "Traceback" not in log.read_text()
    assert Http(url).get("/health")[:2] == (200, {"ready": True})


@pytest.mark.parametrize("count", [450, pytest.param(3000, marks=pytest.mark.slow)])
def test_damaged_media_are_read_or_named(count):
    answers = [answer_to(video, data) for video, data in malformed.media(count, count)]
    refused = [problem for problem in answers if problem is not None]
    assert {problem.status for problem in refused} <= {413, 422}
    assert not any("\n" in str(problem) for problem in refused)
    assert count / 20 < len(refused) < count * 19 / 20, "some are still good, others are not"


def answer_to(video, data):
    """Return None if the file can be read, else the HttpProblem; raise any other exception."""
    body = {"prompt": ["x"], "rewards": [REWARD], "video" if video else "image": [base64.b64encode(data).decode()]}
    try:
        parse_compute(memoryview(json.dumps(body).encode()), Reservation(MemoryBudget(8 * 2**20)).grow)
    except HttpProblem as problem:
        return problem
    return None
