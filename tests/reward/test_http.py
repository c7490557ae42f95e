"""The HTTP API of a real service over real connections: scores, tokens, limits and metrics."""

import base64
import io
import itertools
import json
import socket
import stat
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from reward_http import TIMEOUT_S, TOKEN, Http, enqueue_body, serving
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_ds.monitoring.media_files import encode_gif, save_mp4
from wfm_reward.config import HttpConfig, read_service_token
from wfm_reward.web.json_protocol import parse_compute
from wfm_reward.web.request_body import MemoryBudget, Reservation, check_token
from wfm_reward.web.requests import HttpProblem

BRIGHTNESS, MOODY, OTHER = "probe_rewards:Brightness", "probe_rewards:Moody", "probe_rewards:Other"
MIB = 2**20


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Return the process, ready message and folder of one service, shared by tests that do not break it."""
    folder = tmp_path_factory.mktemp("http")
    token_file = folder / "token"
    token_file.write_text(f"{TOKEN}\n")
    token_file.chmod(0o600)
    config = {
        "http": {"bind": "127.0.0.1:0", "token_file": "token", "max_body_mib": 4, "max_pending_mib": 8,
                 "pull_wait_s": 0.3, "timeout_s": 30},
        "rewards": {
            BRIGHTNESS: {"workers": 2, "max_batch": 4, "max_wait_ms": 50,
                         "options": {"journal": str(folder / "journal")}},
            MOODY: {},
            OTHER: {"max_batch": 1},
            "jpeg_incompressibility": {},
            "motion": {},
        },
    }  # fmt: skip
    with serving(folder, config) as (process, said):
        yield process, said, folder


@pytest.fixture
def http(service):
    return Http(service[1]["http"])


@contextmanager
def nobody_works(service):
    """Suspend the workers inside the block; they score queued requests afterwards."""
    workers = psutil.Process(service[0].pid).children()
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


def images(count, seed=0, size=8):
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def asked(count, *rewards, **more):
    return {"prompts": ["a cat"] * count, "reward_fn": dict.fromkeys(rewards, 1.0), "media_type": "image", **more}


# Cosmos-RL's protocol


def test_images_come_back_with_the_scores_of_each_reward(http):
    media = images(10)
    fields = asked(10, BRIGHTNESS, "jpeg_incompressibility", ignored=0.0)
    fields["reward_fn"]["no_such"] = 0
    status, content, _ = http.enqueue(fields, media)
    assert status == 200
    for name in ("jpeg_incompressibility", BRIGHTNESS):
        while (answer := http.pull(content["uuid"], name))[0] == 400:
            pass
        status, bright, _ = answer
        assert status == 200
        if name != BRIGHTNESS:
            wanted = loaded(name).score(media_batch(media))
            assert bright["scores"][name] == [score.value for score in wanted]  # JSON keeps every bit
    assert bright["type"] == BRIGHTNESS
    assert bright["scores"]["brightness"] == pytest.approx(list(media.mean(axis=(1, 2, 3)) / 255))
    assert bright["scores"]["darkest"] == [float(m.min()) for m in media]
    info = bright["input_info"]
    assert (info["shape"], info["dtype"]) == ([10, 8, 8, 3], "torch.uint8")
    assert (info["min"], info["max"]) == (f"{media.min():.3f}", f"{media.max():.3f}")
    assert float(bright["duration"]) >= 0
    assert "failures" not in bright
    assert http.pull(content["uuid"], BRIGHTNESS)[1] == bright, "to pull changes nothing"


def test_videos_are_sent_channels_first_with_their_frame_rate(http):
    video = np.zeros((1, 3, 4, 8, 8), np.uint8)
    video[:, :, 1::2] = 255
    fields = {"prompts": ["x"], "reward_fn": {"motion": 1}, "media_type": "video", "video_infos": [{"video_fps": 16.0}]}
    answer = http.scores(fields, video, "motion")
    assert answer["scores"]["motion"] == [1.0]
    assert answer["input_info"]["video_infos"] == [{"video_fps": 16.0}]


def test_an_item_that_fails_is_null_and_its_neighbours_are_scored(http):
    fields = asked(3, MOODY) | {"prompts": ["fine", "refuse", "fine"]}
    answer = http.scores(fields, images(3), MOODY)
    assert [type(value) for value in answer["scores"]["brightness"]] == [float, type(None), float]
    assert answer["failures"] == [{"index": 1, "reason": "nothing to see"}]


def test_an_early_pull_must_be_repeated(http, service):
    with nobody_works(service):
        status, content, _ = http.enqueue(asked(2, OTHER, BRIGHTNESS), images(2))
        assert status == 200
        status, answer, _ = http.pull(content["uuid"], OTHER)
        assert (status, answer["error"]["code"]) == (400, "not_ready")
    for reward in (BRIGHTNESS, OTHER):
        while (status := http.pull(content["uuid"], reward)[0]) == 400:
            pass
        assert status == 200


def test_a_wrong_request_is_a_one_line_error(http):
    good, video = asked(1, BRIGHTNESS), {"media_type": "video"}
    for fields, array, says in [
        (asked(2, BRIGHTNESS), images(1), "`prompts` has 2 values for 1 items"),
        (good | {"prompts": [1]}, images(1), "`prompts.0`: Input should be a valid string"),
        (asked(1, "no_such"), images(1), "unknown reward 'no_such'; this service has probe_rewards:Brightness"),
        (asked(1), images(1), "`reward_fn` has no reward with a weight above 0"),
        (good | {"media_type": "sound"}, images(1), "media_type 'sound' with uint8 [1, 8, 8, 3]"),
        (good | {"metadata": [1]}, images(1), "`metadata.0`: Input should be a valid dictionary"),
        (good | {"metadata": [{}] * 2}, images(1), "`metadata` has 2 values for 1 items"),
        (good | video | {"video_infos": []}, np.zeros((1, 3, 2, 4, 4), np.uint8), "`video_infos` has 0 values"),
        (good | {"media_type": "latent"}, np.zeros((1, 16, 2, 4, 4), np.float16), "no latent decoders"),
        (good, images(1).astype(np.int64), "an array of int64; send one of uint8"),
        (good, np.asfortranarray(images(1)), "send C order"),
        (good, np.array([{"a": 1}], dtype=object), "an array of object"),
    ]:
        status, content, _ = http.enqueue(fields, array)
        assert (status, says in content["message"]) == (422, True), content
        assert content["error"]["detail"] == content["message"]
    whole = enqueue_body(good, images(1))
    line = whole.partition(b"\n")[0] + b"\n"
    for body, status, says in [
        (b"{}", 422, "no newline after the JSON"),
        (b"[]\n", 422, "Input should be a valid dictionary"),
        (b"[" * 5000 + b"\n", 422, "the first line is not JSON"),
        (line + b"PK\x03\x04 a zip file", 415, "this looks like torch.save"),
        (line + b"\x93NUMPY\x01\x00\x10\x00{'descr': oops }", 422, "the .npy header cannot be read"),
        (whole[:-1], 422, "the body is cut off or too long"),
        (whole + b"!", 422, "the body is cut off or too long"),
    ]:
        got, content, _ = http.post("/api/reward/enqueue", body)
        assert (got, says in content["message"]) == (status, True), content


def test_a_header_that_promises_ten_gigabytes_allocates_nothing(http, service):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (10000, 1024, 1024, 1), }"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    process = psutil.Process(service[0].pid)
    before = process.memory_info().rss
    got, content, _ = http.post("/api/reward/enqueue", json.dumps(asked(1, BRIGHTNESS)).encode() + b"\n" + npy)
    says = "0 bytes of data, but uint8 [10000, 1024, 1024, 1] has 10485760000"
    assert (got, says in content["message"]) == (422, True)
    assert process.memory_info().rss - before < 64 * MIB


def test_unknown_jobs_and_types_have_different_errors(http):
    assert http.pull("no-such", BRIGHTNESS)[1]["error"]["code"] == "unknown_uuid"
    _, content, _ = http.enqueue(asked(1, BRIGHTNESS), images(1))
    status, answer, _ = http.pull(content["uuid"], "ocr")
    assert (status, answer["error"]["code"]) == (404, "unknown_type")


def test_ping(http):
    form = b"info_data=%7B%7D", {"Content-Type": "application/x-www-form-urlencoded"}
    answers = [http.post(f"/api/reward/{path}", form[0], **form[1]) for path in ("ping", "pin")]
    for status, content, _ in (http.get("/ping"), *answers):
        assert (status, content) == (200, {"message": "Ping request received"})


# Tokens


def test_only_health_is_answered_without_the_token(service):
    tokens = [None, "wrong", TOKEN[:-1], f"{TOKEN}x", "", "caf\u00e9".encode().decode("latin1"), "\xff"]
    for token, (method, path) in itertools.product(tokens, [
        ("GET", "/"), ("GET", "/metrics"), ("GET", "/ping"), ("GET", "/api/rewards"), ("POST", "/api/reward/enqueue"),
        ("POST", "/api/reward/pull"), ("POST", "/api/reward/ping"), ("POST", "/compute"), ("GET", "/no-such"),
    ]):  # fmt: skip
        unknown = Http(service[1]["http"], token)
        status, content, headers = unknown.ask(method, path, b"x" if method == "POST" else None)
        assert (path, status) == (path, 401)
        assert headers["WWW-Authenticate"].startswith("Basic")
        assert TOKEN not in content["message"]
    assert unknown.get("/health")[:2] == (200, {"ready": True})


def test_a_browser_sends_the_token_as_its_password_and_other_headers_are_wrong_tokens():
    right, wrong = (base64.b64encode(f"me:{password}".encode()).decode() for password in (TOKEN, "wrong"))
    check_token(f"Basic {right}", TOKEN)
    for header in (f"Basic {wrong}".encode(), b"\xff", b"Bearer \xff", b"Basic \xff", b"Basic /w=="):
        with pytest.raises(HttpProblem) as problem:
            check_token(header.decode("utf-8", "surrogateescape"), TOKEN)  # aiohttp decodes headers like this
        assert problem.value.status == 401


def test_a_public_port_needs_a_token(tmp_path):
    assert read_service_token(HttpConfig(bind="0.0.0.0:80"), tmp_path, {"WFM_REWARD_TOKEN": "t"}) == "t"
    assert read_service_token(HttpConfig(bind="[::1]:80"), tmp_path, {}) is None


def test_a_token_file_must_be_readable_only_by_its_owner(tmp_path):
    token = tmp_path / "token"
    config = HttpConfig(token_file=token)
    with pytest.raises(RewardError, match="cannot be read"):
        read_service_token(config, tmp_path, {})
    token.write_text("secret")
    token.chmod(0o640)
    with pytest.raises(RewardError, match="others can read this token: chmod 600"):
        read_service_token(config, tmp_path, {})
    token.chmod(0o600)
    assert read_service_token(config, tmp_path, {"WFM_REWARD_TOKEN": "other"}) == "secret"
    token.write_text("\n")
    with pytest.raises(RewardError, match="is empty"):
        read_service_token(config, tmp_path, {})


def test_the_token_appears_in_no_output(http, service):
    _, _, folder = service
    shown = [http.get("/")[1].decode(), http.get("/metrics")[1].decode()]
    assert all(TOKEN not in text for text in [*shown, (folder / "service.log").read_text()])
    pipes = json.loads((folder / "pipes.json").read_text())
    assert pipes["http"] == service[1]["http"]
    assert TOKEN not in json.dumps(pipes)
    assert stat.S_IMODE((folder / "pipes.json").stat().st_mode) == 0o600


# Limits


def raw(service, head, body=b"", token=TOKEN):
    """Send exactly these bytes and return the open connection."""
    host, _, port = service[1]["http"].removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    lines = [head, f"Host: {host}", f"Authorization: Bearer {token}", "", ""]
    connection.sendall("\r\n".join(lines).encode() + body)
    return connection


def test_a_body_above_the_limit_is_refused_before_it_is_read(service):
    started = time.monotonic()
    with raw(service, f"POST /api/reward/enqueue HTTP/1.1\r\nContent-Length: {600 * MIB}") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    with raw(service, "POST /compute HTTP/1.1\r\nTransfer-Encoding: chunked") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 411 ")
    assert time.monotonic() - started < TIMEOUT_S


def pending(http):
    families = text_string_to_metric_families(http.get("/metrics")[1].decode())
    return next(f.samples[0].value for f in families if f.name == "wfm_reward_http_pending_bytes")


def until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"


def test_received_bodies_count_against_the_limit_until_they_are_cut_off(service, http):
    head = f"POST /api/reward/enqueue HTTP/1.1\r\nContent-Length: {4 * MIB}"
    until(lambda: pending(http) == 0)
    slow = [raw(service, head, bytes(4 * MIB - 1)) for _ in range(2)]
    until(lambda: pending(http) == 8 * MIB - 2)
    status, content, headers = http.enqueue(asked(1, BRIGHTNESS), images(1))
    assert (status, content["error"]["code"], headers["Retry-After"]) == (429, "full", "5")
    for connection in slow:
        connection.close()
    until(lambda: pending(http) == 0)
    assert http.scores(asked(1, BRIGHTNESS), images(1), BRIGHTNESS)["scores"]


def test_waiting_media_count_against_the_limit(service, http):
    large = np.zeros((1, 1000, 1000, 3), np.uint8)
    until(lambda: pending(http) == 0)
    with nobody_works(service):
        answers = [http.enqueue(asked(1, OTHER), large) for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 200, 429], "9 MB are more than 8 MiB"
        assert 6_000_000 <= pending(http) < 6_010_000, "bodies that are media count once"
    until(lambda: pending(http) == 0)


@pytest.mark.slow
def test_the_largest_request_is_accepted_and_a_larger_one_refused(tmp_path):
    limits = {"bind": "127.0.0.1:0", "max_body_mib": 4, "max_pending_mib": 2}
    with serving(tmp_path, {"http": limits, "rewards": {OTHER: {}}}) as (_, said):
        http = Http(said["http"], None)
        assert http.scores(asked(1, OTHER), np.zeros((1, 800, 800, 3), np.uint8), OTHER)["scores"]
        status, content, _ = http.enqueue(asked(1, OTHER), np.zeros((1, 1000, 1000, 3), np.uint8))
        assert (status, content["error"]["code"]) == (413, "too_large")


def test_junk_on_the_port_does_no_harm(service, http):
    host, _, port = service[1]["http"].removeprefix("http://").rpartition(":")
    for junk in (b"\x00\xff" * 5000, b"GET / HTTP/9.9\r\n\r\n", b"POST /" + b"a" * 20000, b"\x16\x03\x01\x02\x00\x01"):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(20)
            assert not answer or answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.0 4")
    assert http.get("/health")[0] == 200


# Plain JSON


def encoded(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def compute(http, **fields):
    return http.post("/compute", json.dumps(fields), **{"Content-Type": "application/json"})


def test_plain_json_scores_images_of_any_size(http):
    small, large = images(1, size=8)[0], images(1, seed=1, size=16)[0]
    status, content, _ = compute(
        http, prompt=["fine", "refuse", "fine"], image=[encoded(small), encoded(small), encoded(large)],
        rewards=[MOODY, BRIGHTNESS],
    )  # fmt: skip
    assert status == 200
    assert content["rewards"] == content["scores"][MOODY]
    assert content["scores"][BRIGHTNESS] == pytest.approx([p.mean() / 255 for p in (small, small, large)])
    assert content["failures"] == [{"reward": MOODY, "index": 1, "reason": "nothing to see"}]


def test_plain_json_takes_videos_as_frames(http):
    black, white = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)
    video = [encoded(black), encoded(white), encoded(white)]
    status, content, _ = compute(http, prompt=["x"], video=[video], rewards=["motion"], fps=8)
    assert (status, content["rewards"]) == (200, [0.5])


@pytest.mark.parametrize("kind", ["mp4", "gif"])
def test_plain_json_takes_videos_as_files(tmp_path, kind):
    video = np.repeat(np.array([0, 128, 255], np.uint8), 16 * 16 * 3).reshape(3, 16, 16, 3)
    save_mp4(tmp_path / "v.mp4", video, 8)
    data = (tmp_path / "v.mp4").read_bytes() if kind == "mp4" else encode_gif(video, 8)
    request, _ = parsed(prompt=["x"], video=[base64.b64encode(data).decode()], rewards=["motion"], fps=8)
    assert np.abs(request.media[0].astype(int) - video).max() <= 2


def parsed(**fields):
    return parse_compute(memoryview(json.dumps(fields).encode()), Reservation(MemoryBudget(8 * MIB)).grow)


SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"


@pytest.mark.parametrize("script", ["ffconcat version 1.0\nfile private.mp4\n", SDP], ids=["concat", "sdp"])
def test_a_video_that_names_other_sources_is_refused_before_they_are_opened(tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    save_mp4(tmp_path / "private.mp4", np.zeros((3, 16, 16, 3), np.uint8), 8)
    with pytest.raises(HttpProblem, match=r"a video cannot be read: .*Invalid argument"):
        parsed(prompt=["x"], video=[base64.b64encode(script.encode()).decode()], rewards=["motion"])


def test_wrong_plain_json_is_a_one_line_error(http):
    good = {"prompt": ["x"], "image": [encoded(images(1)[0])], "rewards": [BRIGHTNESS]}
    for fields, says in [
        ({"prompt": []}, "`prompt`: List should have at least 1 item"),
        ({"image": None}, "send `image` or `video`"),
        ({"image": ["AAAA"]}, "an image cannot be read"),
        ({"image": ["?"]}, "images and videos must be base64"),
        ({"image": [1]}, "`image.0`: Input should be a valid string"),
        ({"image": None, "video": [[]]}, "a video must be a list of base64 images"),
        ({"image": None, "video": ["AAAA"]}, "a video cannot be read"),
        ({"rewards": "x"}, "`rewards`: Input should be a valid list"),
        ({"rewards": ["no_such"]}, "unknown reward 'no_such'; this service has"),
        ({"fps": -1}, "`fps`: Input should be greater than 0"),
        ({"images": []}, "`images`: Extra inputs are not permitted"),
        ({"metadata": [{}, {}]}, "`metadata` has 2 values for 1 items"),
    ]:
        status, content, _ = compute(http, **(good | fields))
        assert (status, says in content["message"]) == (422, True), content


def test_too_large_or_invalid_json_is_a_one_line_error():
    for body, says in [
        (b"[" + b"[]," * 500_001 + b"[]]", "more than 500000 values: send fewer items"),
        (json.dumps({"prompt": ["x"] * 4097, "rewards": ["a"]}).encode(), "`prompt`: List should have at most 4096"),
        (b"[" * 5000, "the body is not JSON"),
        (b'{"prompt": ["\\ud800"], "image": ["x"], "rewards": ["motion"]}', "a lone surrogate|valid string"),
    ]:
        with pytest.raises(HttpProblem, match=says):
            parse_compute(memoryview(body), Reservation(MemoryBudget(8 * MIB)).grow)


def test_an_image_with_too_many_pixels_is_refused_by_its_header(http):
    bomb = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(bomb, "PNG")  # 48 MB of black pixels in 50 KB
    picture = base64.b64encode(bomb.getvalue()).decode()
    status, content, _ = compute(http, prompt=["x"], image=[picture], rewards=[BRIGHTNESS])
    assert (status, content["error"]["code"]) == (413, "too_large")


def test_images_decoded_at_once_share_the_memory_budget():
    """The memory that the first request reserves is not available to a second one at the same time."""
    budget = MemoryBudget(4 * MIB)
    first, second = Reservation(budget), Reservation(budget)
    first.grow(1000)
    second.grow(1000)
    picture = encoded(np.zeros((1000, 1000, 3), np.uint8))
    body = memoryview(json.dumps({"prompt": ["x"], "image": [picture], "rewards": ["motion"]}).encode())
    parse_compute(body, first.grow)
    with pytest.raises(HttpProblem) as problem:
        parse_compute(body, second.grow)
    assert problem.value.status == 429
    heir = first.transfer(10)
    first.release()
    assert budget.reserved_bytes == 1010
    heir.release()
    heir.release()
    second.release()
    assert budget.reserved_bytes == 0


def test_the_time_limit_of_a_request_also_applies_to_running_tasks(http, service):
    pictures = [encoded(images(1)[0])] * 3
    with nobody_works(service):
        status, content, _ = compute(http, prompt=["x"] * 3, image=pictures, rewards=[OTHER], timeout_s=0.2)
    assert (status, content["rewards"]) == (200, [None] * 3)
    assert [failure["reason"] for failure in content["failures"]] == ["deadline"] * 3


def test_the_service_describes_its_rewards(http):
    status, content, _ = http.get("/api/rewards")
    assert status == 200
    motion = {"media": ["video"], "primary": "motion", "outputs": {"motion": [0.0, 1.0]}, "needs": []}
    assert content["motion"] == motion
    assert content["jpeg_incompressibility"]["outputs"] == {"jpeg_incompressibility": [0.0, None]}


# Metrics and status


def test_the_metrics_are_valid_for_prometheus(http):
    def read():
        families = text_string_to_metric_families(http.get("/metrics")[1].decode())
        return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}

    before = read()
    http.scores(asked(3, MOODY) | {"prompts": ["fine", "refuse", "raise"]}, images(3), MOODY)
    after = read()

    def more(*key):
        return after[key] - before.get(key, 0)

    assert more("wfm_reward_items_total", MOODY, "scored") == 1
    assert more("wfm_reward_items_total", "failed", MOODY) == 2
    assert more("wfm_reward_failures_total", "nothing to see", MOODY) == 1
    assert more("wfm_reward_failures_total", "RuntimeError", MOODY) == 1
    assert more("wfm_reward_score_seconds_count", MOODY) == 3
    assert after["wfm_reward_score_seconds_bucket", "+Inf", MOODY] == after["wfm_reward_score_seconds_count", MOODY]
    assert after["wfm_reward_workers", BRIGHTNESS, "ready"] == 2
    assert after["wfm_reward_waiting", MOODY] == 0
    assert more("wfm_reward_requests_total", "/api/reward/enqueue", "200") == 1


def test_requests_of_many_clients_are_scored_together(http, service):
    """max_wait_ms: single images that arrive together share a batch."""
    with nobody_works(service):
        uuids = [http.enqueue(asked(1, BRIGHTNESS), images(1, seed=i))[1]["uuid"] for i in range(12)]
    for i, uuid in enumerate(uuids):
        while (answer := http.pull(uuid, BRIGHTNESS))[0] == 400:
            pass
        assert answer[1]["scores"]["brightness"] == pytest.approx([images(1, seed=i).mean() / 255])
    ours = {f"{uuid[:8]}-0" for uuid in uuids}
    batches = [ours & set(json.loads(line)["ids"]) for line in (service[2] / "journal").read_text().splitlines()]
    assert ours == set().union(*batches)
    assert max(map(len, batches)) > 1


def test_a_loading_service_says_so_and_a_port_in_use_is_an_error(tmp_path, service):
    taken = service[1]["http"].removeprefix("http://")
    with pytest.raises(AssertionError, match=f"error: cannot listen at http.bind {taken}"):  # noqa: SIM117
        with serving(tmp_path, {"http": {"bind": taken}, "rewards": {"color": {}}}):
            pass
