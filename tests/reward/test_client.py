"""RewardService and RewardClient together: the scores, failures and errors that a trainer gets."""

import dataclasses
import json
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml

from each_case import check_each
from reward_http import Http, serving, started_client
from reward_samples import media_batch
from wfm_ds.errors import RewardError
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.reward_service import RewardService, build_service_config
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.keys import create_key_pair
from wfm_reward.config import load_config

BRIGHTNESS, OTHER, MOODY = (f"probe_rewards:{name}" for name in ("Brightness", "Other", "Moody"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return the recipe, folder and journal of one service, shared by tests that do not break it."""
    folder = tmp_path_factory.mktemp("run")
    options = {"journal": str(folder / "journal")}
    recipe = a_recipe(
        {"name": BRIGHTNESS, "max_batch": 4, "options": options}, {"name": OTHER, "weight": 0}, {"name": MOODY}
    )
    with RewardService(recipe, folder) as service:
        yield recipe, service, folder


@pytest.fixture
def client(shared):
    recipe, service, _ = shared
    with closing(RewardClient(service.endpoint, recipe, "run", "rank0")) as client:
        yield client


def a_recipe(*functions, **changes):
    return RewardRecipe(functions=list(functions), **({"timeout_s": 30, "start_timeout_s": 30} | changes))


def a_batch(count, prompts=None, metadata=None, seed=0, shape=(8, 6, 3), prefix="s"):
    media = np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)
    return media_batch(media, prompts, metadata or [{"i": i} for i in range(count)], prefix=prefix)


def journal(folder):
    return [json.loads(line) for line in (folder / "journal").read_text().splitlines()]


def test_every_sample_has_all_correct_scores(client):
    batch = a_batch(11)
    client.submit(batch)
    scores = client.wait()
    assert set(scores) == set(batch.sample_ids)
    for i, sample_id in enumerate(batch.sample_ids):
        want = batch.media[i].astype(np.float64).mean() / 255
        assert set(scores[sample_id]) == {BRIGHTNESS, OTHER, MOODY}
        for name, score in scores[sample_id].items():
            assert (score.sample_id, score.reward, score.failure) == (sample_id, name, None)
            assert score.value == pytest.approx(want, rel=1e-12)
            assert score.parts == {"darkest": float(batch.media[i].min())}
            assert score.seconds > 0


def test_rewards_get_the_frame_rate_and_large_clips_have_their_own_message(client, shared, monkeypatch):
    messages = []
    submit = PipeClient.submit

    def watched(self, rows, *rest):
        messages.append([row["fps"] for row in rows])
        return submit(self, rows, *rest)

    monkeypatch.setattr(PipeClient, "submit", watched)
    monkeypatch.setattr("wfm_ds.transport.client.MAX_SUBMISSION_BYTES", 1000)
    small, large = a_batch(3, shape=(5, 4, 4, 3), prefix="a"), a_batch(3, shape=(7, 8, 8, 3), prefix="b")
    for batch in (small, large):
        client.submit(dataclasses.replace(batch, fps=7.5))
    scores = client.wait()
    assert messages == [[7.5] * 3, [7.5], [7.5], [7.5]]  # 240 bytes per clip share a message, 1344 bytes do not
    for batch in (small, large):
        want = batch.media.reshape(3, -1).astype(np.float64).mean(axis=1) / 255
        assert [scores[i][BRIGHTNESS].value for i in batch.sample_ids] == pytest.approx(list(want), rel=1e-12)
    assert {line["fps"] for line in journal(shared[2]) if line["ids"][0][0] in "ab"} == {7.5}


def test_scores_are_in_the_order_of_the_recipe(client):
    client.submit(a_batch(2))
    names = [BRIGHTNESS, OTHER, MOODY]
    for task_id in sorted(client._pending_tasks, reverse=True):
        client._fail_task(client._pending_tasks.pop(task_id), "first")
    assert [list(of_sample) for of_sample in client.wait().values()] == [names, names]


def test_one_wait_collects_several_submissions_once(client):
    for k in range(4):
        client.submit(a_batch(3, prefix=f"b{k}-"))
    assert set(client.wait()) == {f"b{k}-{i}" for k in range(4) for i in range(3)}
    assert client.wait() == {}


def test_answers_after_the_deadline_are_ignored(client):
    client._record_outcome(TaskOutcome("given up", True, 0.1, {"scores": [[0.5, None, {}]]}, ""))
    assert client.wait() == {}


def test_the_caller_may_reuse_its_buffer_at_once(client):
    batch = a_batch(2, seed=5)
    want = batch.media.astype(np.float64).mean(axis=(1, 2, 3)) / 255
    client.submit(batch)
    batch.media[:] = 0
    scores = client.wait()
    assert [scores[i][OTHER].value for i in batch.sample_ids] == pytest.approx(list(want), rel=1e-12)


def test_media_are_sent_once_for_all_rewards(client, shared, monkeypatch):
    sent = []
    submit = PipeClient.submit

    def watched(self, rows, tensors, tasks, first_row):
        sent.append((len(rows), sum(t.nbytes for _, t in tensors), [(t.kind, t.start, t.stop) for t in tasks]))
        submit(self, rows, tensors, tasks, first_row)

    monkeypatch.setattr(PipeClient, "submit", watched)
    batch = a_batch(70, prefix="many-")
    client.submit(batch)
    assert len(client.wait()) == 70
    assert [(rows, nbytes) for rows, nbytes, _ in sent] == [(64, 64 * 144), (6, 6 * 144)]
    kind = f"score:{BRIGHTNESS}"
    assert {task for task in sent[1][2] if task[0] == kind} == {(kind, 64, 68), (kind, 68, 70)}
    batches = [line["ids"] for line in journal(shared[2]) if line["ids"][0].startswith("many-")]
    assert [len(ids) for ids in batches] == [4] * 16 + [4, 2]
    assert [i for ids in batches for i in ids] == list(batch.sample_ids)


def test_failures_are_named_and_neighbours_and_other_rewards_are_scored(client):
    client.submit(a_batch(4, ["fine", "raise", "refuse", "fine"]))
    scores = client.wait()
    failures = [None, "RuntimeError: this picture is unbearable", "nothing to see", None]
    assert [scores[f"s{i}"][MOODY].failure for i in range(4)] == failures
    assert all(scores[f"s{i}"][OTHER].value is not None for i in range(4))


def test_an_item_that_cannot_be_sent_is_a_named_failure(client):
    metadata = [{}, {"text": "x" * 70000}, {"number": np.float32(1)}, {"ok": [1, {"deep": "2"}]}]
    client.submit(a_batch(4, ["a", "b", "c", "half a pair \ud800"], metadata))
    scores = client.wait()
    failures = [scores[f"s{i}"][OTHER].failure for i in range(4)]
    assert failures[0] is None
    assert failures[1].startswith("cannot be sent: submit: header of")
    assert failures[2].startswith("cannot be sent: not a plain value: can not serialize 'numpy.float32'")
    assert failures[3].startswith("cannot be sent: not a plain value: 'utf-8' codec")
    assert set(scores["s1"]) == {BRIGHTNESS, OTHER, MOODY}


def test_many_long_prompts_are_sent_in_several_messages(client):
    client.submit(a_batch(40, ["x" * 4000] * 40))
    assert all(score.value is not None for of_sample in client.wait().values() for score in of_sample.values())


def test_the_service_is_private_and_its_configuration_is_the_recipes(shared):
    recipe, service, folder = shared
    assert service.endpoint == str(folder / "pipes.json")
    written = yaml.safe_load((folder / "reward_service.yaml").read_text())
    assert written["rewards"][BRIGHTNESS]["max_batch"] == 4
    assert load_config(folder / "reward_service.yaml").rewards[BRIGHTNESS].stall_s == 30
    assert written == build_service_config(recipe, Path(written["pipes"]["folder"]))


def test_the_class_of_a_reward_sets_its_batch_size_and_timeout():
    few, patient = "probe_rewards:Few", "probe_rewards:Patient"
    for timeout_s, stall_s in ((30, 30), (600, 300)):
        recipe = a_recipe({"name": few}, {"name": f"{patient}/b", "device": "cuda:7"}, timeout_s=timeout_s)
        rewards = build_service_config(recipe, Path("sockets"))["rewards"]
        assert rewards[few] == {"stall_s": min(timeout_s, 120), "device": "cpu", "workers": 1, "options": {}}
        assert (rewards[f"{patient}/b"]["stall_s"], rewards[f"{patient}/b"]["device"]) == (stall_s, "cuda:7")


@pytest.mark.slow
def test_one_class_scores_under_two_labels_in_batches_that_it_accepts(tmp_path):
    few, journal = "probe_rewards:Few", tmp_path / "journal"
    names = [few, f"{few}/again"]
    with started_client(tmp_path, *({"name": name, "options": {"journal": str(journal)}} for name in names)) as client:
        client.submit(a_batch(6))
        scores = client.wait()
    assert all(scores[f"s{i}"][name].value is not None for i in range(6) for name in names)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {(line["reward"], len(line["ids"])) for line in lines} == {(name, n) for name in names for n in (4, 2)}


def test_a_service_that_lacks_a_reward_is_an_error_that_names_what_it_offers(shared):
    _, service, _ = shared
    offers = rf"does not offer ocr of the recipe; it offers {BRIGHTNESS}, {MOODY}, {OTHER}"
    with pytest.raises(RewardError, match=offers):
        RewardClient(service.endpoint, a_recipe({"name": "ocr"}), "run", "rank1")


def test_a_running_service_must_compute_what_the_recipe_says(shared):
    _, service, _ = shared
    function = {"name": OTHER, "options": {"seconds": 3}}
    recipe = a_recipe(function, spawn=False, endpoint=service.endpoint)
    with pytest.raises(RewardError, match=r"with the options \{\}, but the recipe has \{'seconds': 3\}"):
        RewardClient(service.endpoint, recipe, "run", "rank1")
    same = a_recipe({"name": OTHER}, spawn=False, endpoint=service.endpoint)
    address = json.loads(Path(service.endpoint).read_text())["clients"]
    with closing(RewardClient(address, same, "run", "rank1")) as client:
        client.submit(a_batch(1))
        assert client.wait()["s0"][OTHER].value is not None


@check_each(
    ("endpoint", "says"),
    [
        ("/nowhere/pipes.json", "reward service: no reply within 0.5 s: /nowhere/pipes.json does not exist"),
        ("ipc:///tmp/wfm-nobody-is-here", "reward service: no reply within 0.5 s: nothing listens at ipc:"),
        ("tcp://10.1.2.3:80", "reward service: tcp://10.1.2.3:80: tcp:// needs keys"),
        ("http://localhost:80", "reward service: 'http://localhost:80' is not an endpoint"),
    ],
)
def test_an_unreachable_service_is_an_error_within_the_timeout(endpoint, says, caplog, monkeypatch):
    monkeypatch.setattr("wfm_ds.transport.client.REPORT_DELAY_S", 0.2)
    started = time.monotonic()
    with pytest.raises(RewardError) as error:
        RewardClient(endpoint, a_recipe({"name": OTHER}, start_timeout_s=0.5), "run", "rank0")
    assert str(error.value).startswith(says)
    assert time.monotonic() - started < 8
    if "no reply" in says:
        assert "waiting up to 0.5 s for the service: " in caplog.text


@pytest.mark.slow
def test_the_error_of_a_service_that_cannot_start_is_shown(tmp_path):
    with pytest.raises(RewardError, match="CannotLoad cannot start: the package rapidfoo is missing: pip install"):
        RewardService(a_recipe({"name": "probe_rewards:CannotLoad"}), tmp_path)
    assert not (tmp_path / "pipes.json").exists()


def test_a_service_that_takes_too_long_is_an_error(tmp_path):
    with pytest.raises(RewardError, match=r"not ready after 0\.05 s \(log: .*reward_service\.log\)"):
        RewardService(a_recipe({"name": OTHER}, start_timeout_s=0.05), tmp_path)


@pytest.mark.slow
def test_submit_does_not_wait_and_a_deadline_fails_only_its_reward(tmp_path):
    slow = {"name": BRIGHTNESS, "options": {"seconds": 0.6}, "max_batch": 1}
    with started_client(tmp_path, slow, {"name": OTHER}, timeout_s=3.0) as client:
        started = time.monotonic()
        client.submit(a_batch(2, prefix="in-time"))
        submitted = time.monotonic()
        scores = client.wait()
        waited = time.monotonic()
        assert submitted - started < 1.0
        assert waited - started >= 1.2, "two items of 0.6 seconds each"
        assert all(s.failure is None for of_sample in scores.values() for s in of_sample.values())

        client.submit(a_batch(6, prefix="late"))
        late = client.wait()
        failures = [late[f"late{i}"][BRIGHTNESS].failure for i in range(6)]
        assert failures[0] is None
        assert failures[-1] == f"timeout after 3 s in {BRIGHTNESS}"
        assert all(late[f"late{i}"][OTHER].value is not None for i in range(6))

        client.submit(a_batch(1, prefix="again"))
        assert client.wait()["again0"][BRIGHTNESS].value is not None, "what nobody waits for is not scored first"


@pytest.mark.slow
def test_a_service_with_keys_scores_for_clients_with_a_key(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    for name in ("hub", "trainer"):
        create_key_pair(keys, name)
    config = {
        "pipes": {"clients": "tcp://127.0.0.1:0", "keys": "keys"},
        "http": {"bind": "127.0.0.1:0"},
        "rewards": {OTHER: {}},
    }
    with serving(tmp_path, config) as (_, said):
        recipe = a_recipe({"name": OTHER}, spawn=False, endpoint=said["pipes"], keys=str(keys))
        client = RewardClient(said["pipes"], recipe, "run", "rank0")
        client.submit(a_batch(2))
        assert all(scores[OTHER].value is not None for scores in client.wait().values())
        client.close()
        fields = {"prompts": ["x"], "media_type": "image", "reward_fn": {OTHER: 1}}
        answer = Http(said["http"], None).scores(fields, a_batch(1).media, OTHER)
        assert answer["scores"]["brightness"][0] is not None, "the HTTP port is a client too"
        without = a_recipe({"name": OTHER}, spawn=False, endpoint=said["pipes"], start_timeout_s=2)
        with pytest.raises(RewardError, match="tcp:// needs keys"):
            RewardClient(said["pipes"], without, "run", "rank0")
    with pytest.raises(RewardError, match="expected exactly one client key"):
        RewardClient("tcp://10.0.0.5:1", without.model_copy(update={"keys": tmp_path}), "run", "rank0")


def test_keys_need_a_separate_service():
    with pytest.raises(ValueError, match="keys is for a running service"):
        a_recipe({"name": OTHER}, keys="keys")
