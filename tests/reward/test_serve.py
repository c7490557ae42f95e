"""The reward service as a program: configuration, registry, checks around a reward, start and shutdown."""

import json
import math
import os
import re
import selectors
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import pytest
import yaml

from each_case import check_each
from pages import write_code
from wfm_ds.errors import RewardError
from wfm_ds.transport import wire
from wfm_ds.transport.broker import Broker
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.keys import create_key_pair
from wfm_ds.transport.worker import LeasedTask
from wfm_reward import registry, serve, worker_pool
from wfm_reward.base import Range, Reward
from wfm_reward.config import RewardConfig, load_config
from wfm_reward.worker import RewardScorer

TIMEOUT_S = 40


def write_config(folder, text):
    path = folder / "service.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def a_service(config):
    command = [sys.executable, "-m", "wfm_reward.serve", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def a_scorer(reward="Brightness", max_batch=8, **options):
    """Return the checks around a reward as a worker uses them."""
    return RewardScorer(registry.create_reward(f"probe_rewards:{reward}", "cpu", options), "mine", max_batch)


def score(scorer, media, prompts=None, metadata=None, fps=None):
    """Return the scores of images or videos."""
    pairs = zip(prompts or [""] * len(media), metadata or [{}] * len(media), strict=True)
    rows = [{"id": f"s{i}", "prompt": p, "metadata": m, "fps": fps} for i, (p, m) in enumerate(pairs)]
    return list(scorer.score_items(rows, media))


def grey(value, shape=(4, 4, 3)):
    return np.full(shape, value, np.uint8)


# The checks around a reward


@check_each(
    ("prompt", "failure"),
    [
        ("raise", "RuntimeError: this picture is unbearable"),
        ("nan", "non-finite value nan"),
        ("nan part", "sharpness = nan is not finite"),
        ("huge", "brightness = 7.5 is outside 0 to 1"),
        ("text", "score() returned a str instead of a Score"),
        ("refuse", "nothing to see"),
        ("short", "score() returned 0 scores for 1 items"),
        ("none", "score() returned a NoneType, not a list of scores for 1 items"),
    ],
)
def test_one_bad_item_is_a_named_failure_and_its_neighbours_are_scored(prompt, failure):
    before, bad, after = score(a_scorer("Moody"), [grey(51)] * 3, ["fine", prompt, "fine"])
    assert (bad.value, bad.failure, bad.sample_id, bad.reward) == (None, failure, "s1", "mine")
    for good in (before, after):
        assert (good.value, good.failure, good.parts) == (0.2, None, {"darkest": 51.0})


def test_scores_in_the_wrong_place_are_failures():
    first, second = score(a_scorer("Moody"), [grey(51)] * 2, ["swap", "fine"])
    assert first.failure == "score() returned the score of 's1' in its place"
    assert second.failure == "score() returned the score of 's0' in its place"


def test_missing_metadata_fail_only_their_item():
    with_label, without = score(a_scorer("Labelled"), [grey(51)] * 2, metadata=[{"label": 3}, {}])
    assert with_label.value == 0.2
    assert without.failure == "missing metadata or inputs: label"


def test_unsupported_media_are_named_failures():
    class ForVideos(registry.get_reward_class("probe_rewards:Brightness")):
        media_types = frozenset({"video"})

    (some,) = score(RewardScorer(ForVideos(), "mine", 4), [grey(0)])
    assert some.failure == "the reward accepts only videos, but the sample is an image"


def test_images_of_different_sizes_are_scored_one_by_one():
    assert [s.value for s in score(a_scorer(), [grey(51), grey(102, (8, 4, 3))])] == [0.2, 0.4]


def task_in_hand(task_id, shapes, fps=None, value=51, attempt=1):
    """Return a task as a worker receives it, with its tensors in a message."""
    media = [grey(value, shape) for shape in shapes]
    rows = [{"id": f"{task_id}-{i}", "prompt": "", "metadata": {}, "fps": fps} for i in range(len(shapes))]
    specs, frames = wire.pack_tensors([("media", m) for m in media])
    message = wire.Message("task", 1, {"rows": rows}, tuple(specs), tuple(frames))
    return LeasedTask(task_id, attempt, "score:x", rows, message)


def test_tasks_that_arrive_together_are_scored_in_batches_of_one_shape_and_speed(tmp_path):
    journal = tmp_path / "journal"
    image, video = (4, 4, 3), (2, 4, 4, 3)
    tasks = [
        task_in_hand("a", [image] * 2),
        task_in_hand("b", [image], value=102),
        task_in_hand("c", [video], fps=8.0),
        task_in_hand("d", [video], fps=16.0),
        task_in_hand("e", [(4, 4)]),
        task_in_hand("f", [image] * 3),
    ]
    marks = []
    answers = a_scorer(max_batch=2, journal=str(journal)).score_tasks(tasks, lambda *mark: marks.append(mark))
    batches = [json.loads(line)["ids"] for line in journal.read_text().splitlines()]
    assert batches == [["a-0", "a-1"], ["b-0"], ["c-0"], ["d-0"], ["f-0", "f-1"], ["f-2"]]
    assert marks == [(done, 8) for done in range(1, 9)]
    assert str(answers[4]) == "each item needs a uint8 array of shape [H,W,3] or [T,H,W,3]"
    assert [a["scores"][0][0] for a in answers if isinstance(a, dict)] == [0.2, 0.4, 0.2, 0.2, 0.2]
    assert [len(a["scores"]) for a in answers if isinstance(a, dict)] == [2, 1, 1, 1, 3]


@check_each(
    ("change", "says"),
    [
        ({"id": None}, "row 1: missing or wrong type: id"),
        ({"prompt": 3, "metadata": []}, "row 1: missing or wrong type: prompt and metadata"),
        ({"fps": "fast"}, "row 1: missing or wrong type: fps"),
    ],
)
def test_a_task_whose_rows_are_wrong_fails_alone(change, says):
    tasks = [task_in_hand(name, [(4, 4, 3)] * 2) for name in "abc"]
    tasks[1].rows[1].update(change)
    del tasks[2].rows[0]["fps"]  # it is optional
    answers = a_scorer().score_tasks(tasks, lambda *_: None)
    assert (str(answers[1]), answers[1].fatal) == (says, True)
    assert [[score[0] for score in answer["scores"]] for answer in (answers[0], answers[2])] == [[0.2, 0.2]] * 2


def test_a_worker_of_another_python_needs_no_install_of_ours(tmp_path):
    """It imports our packages from PYTHONPATH alone; the other Python is a wrapper script around this one."""
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.write_text(f'#!/bin/sh\nexec env -u PYTHONHOME "{sys.executable}" -S "$@"\n')
    link.chmod(0o755)
    packages = Path(np.__file__).parent.parent
    program = worker_pool.reward_program("mock", RewardConfig(python=link))
    environment = {**worker_pool._worker_environment(), "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] += f"{os.pathsep}{packages}"
    command = [str(program.python), "-c", "import wfm_reward.worker, wfm_ds; print(wfm_ds.__file__)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent.name == "wfm_ds"


def test_ranges_include_their_ends_and_never_nan():
    assert [value in Range(0.0, 1.0) for value in (0.0, 1.0, 1.0000001, math.nan)] == [True, True, False, False]


# Lookup of rewards


@check_each(
    ("name", "says"),
    [
        ("color_", r"unknown reward 'color_'; did you mean color\? Known: .*aesthetic, .*clipscore, color, .*ocr"),
        ("no_such_package:X", "cannot import 'no_such_package'"),
        (":X", "expected package.module:Class"),
        ("probe_rewards:Missing", "has no class 'Missing'"),
        ("probe_rewards:json", "has no class 'json'"),
        ("wfm_reward.base:Reward", "the class does not implement score"),
    ],
)
def test_an_unknown_reward_or_an_invalid_class_path_is_named(name, says):
    with pytest.raises(RewardError, match=says):
        registry.get_reward_class(name)


class Sharpness(Reward):
    """A minimal user reward: its only options are the parameters of `__init__`."""

    name, media_types, primary_output = "sharpness", frozenset({"image"}), "sharpness"
    outputs: ClassVar = {"sharpness": Range(0.0, 1.0)}
    max_batch = 4

    def __init__(self, *, radius: int = 2) -> None:
        self.radius = radius

    def score(self, batch):
        return [item.score(item.frames.mean() / 255 / self.radius) for item in batch]


@pytest.fixture
def sharpness(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_rewards", SimpleNamespace(Sharpness=Sharpness))
    return "users_rewards:Sharpness"


def test_options_are_the_keyword_parameters_of_the_constructor(sharpness):
    assert registry.create_reward(sharpness, "cuda:0", {}).radius == 2
    made = registry.create_reward(sharpness, "cuda:0", {"radius": 3, "frames": "uniform:2"})
    assert (made.radius, made.device, made.frames.text) == (3, "cuda:0", "uniform:2")
    (some,) = score(RewardScorer(made, "mine", 4), [grey(153, (6, 4, 4, 3))], fps=8.0)
    assert some.value == pytest.approx(0.2)
    for option in ("size", "device"):
        with pytest.raises(RewardError, match=f"sharpness has no option {option}; its options are frames, radius"):
            registry.create_reward(sharpness, "cpu", {option: 1})
    with pytest.raises(RewardError, match="reward sharpness: frames is 'all'"):
        registry.create_reward(sharpness, "cpu", {"frames": "all"})


def test_a_batch_is_as_large_as_its_reward_allows(sharpness, tmp_path, capsys):
    registry.check_reward(sharpness, "cpu", {}, 4)
    with pytest.raises(RewardError, match="accepts at most 4 items per batch; max_batch is 5"):
        registry.check_reward(sharpness, "cpu", {}, 5)
    config = write_config(tmp_path, {"rewards": {sharpness: {"max_batch": 5}}})
    assert serve.main([str(config), "--check"]) == 2
    assert "error: reward users_rewards:Sharpness accepts at most 4 items per batch" in capsys.readouterr().err


def test_an_unset_batch_size_is_16_or_what_its_reward_allows(sharpness, tmp_path, capsys):
    assert [registry.resolve_max_batch(name, None) for name in (sharpness, "color")] == [4, 16]
    config = write_config(tmp_path, {"rewards": {sharpness: {}, f"{sharpness}/again": {}}})
    assert serve.main([str(config), "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == [sharpness, f"{sharpness}/again"]
    program = worker_pool.reward_program(sharpness, load_config(config).rewards[sharpness])
    assert program.settings["max_batch"] == 4


def test_a_label_does_not_change_the_class(sharpness):
    assert registry.get_reward_class(f"{sharpness}/again") is registry.get_reward_class(sharpness)
    assert registry.create_reward(f"{sharpness}/again", "cpu", {"radius": 3}).radius == 3
    with pytest.raises(RewardError, match=f"reward {sharpness}/ has no label"):
        registry.get_reward_class(f"{sharpness}/")


def test_the_reward_of_the_docs_is_valid(tmp_path, monkeypatch):
    write_code("own_reward.md", "my_rewards.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    reward = registry.create_reward("my_rewards:Brightness", "cpu", {"target": 0.5})
    reward.load()
    (some,) = score(RewardScorer(reward, "mine", 4), [grey(255)])
    assert (some.value, some.failure) == (0.5, None)


# The configuration


@check_each(
    ("text", "says"),
    [
        ("rewards: {color: {devcie: cpu}}", r"rewards\.color\.devcie is not a key; did you mean device\?"),
        ("rewards: {color: {}}\nwebsite: {}", r"website is not a key; known are pipes, http, latent_decoders, rewards"),
        ("rewards: {color: {}}\nhttp: {port: 1}", r"http\.port is not a key; known are bind, token_file"),
        ("rewards: {color: {}}\nhttp: {bind: nowhere}", r"http\.bind: .*'nowhere' is not HOST:PORT"),
        ("pipes: {client: ipc}\nrewards: {color: {}}", r"pipes\.client is not a key; did you mean clients\?"),
        ("rewards: {color: {workers: 0}}", r"rewards\.color\.workers: .*greater than 0"),
        ("rewards: {}", r"rewards: .*at least 1"),
        ("rewards: [color]", r"rewards: .*dictionary"),
        ("- a", r"must be a mapping"),
        ("rewards: {", r"cannot be read"),
        (None, r"cannot be read"),
    ],
)
def test_a_wrong_configuration_is_a_one_line_error(tmp_path, text, says):
    path = tmp_path / "nowhere.yaml" if text is None else write_config(tmp_path, text)
    with pytest.raises(RewardError, match=says) as error:
        load_config(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_the_configuration_of_the_docs_is_valid(tmp_path, root):
    (text,) = re.findall(r"```yaml\n(pipes:.*?)```", (root / "docs" / "reward_service.md").read_text(), re.DOTALL)
    config = load_config(write_config(tmp_path, text))
    assert set(config.rewards) <= set(registry.list_reward_names())
    for name, reward in config.rewards.items():
        registry.create_reward(name, reward.device if name != "ocr" else "cpu", reward.options)


def test_check_starts_nothing_and_reports(tmp_path, capsys):
    good = write_config(tmp_path, "rewards: {color: , digits: {workers: 2}}")
    assert serve.main([str(good), "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == ["color", "digits"]
    bad = write_config(tmp_path, "rewards: {colour: {}}")
    assert serve.main([str(bad), "--check"]) == 2
    assert "error: unknown reward 'colour'; did you mean color?" in capsys.readouterr().err


@check_each(
    ("config", "says"),
    [
        ({"pipes": {"clients": "tcp://127.0.0.1:0"}}, "tcp:// needs keys"),
        ({"pipes": {"clients": "tcp://0.0.0.0:1", "keys": "keys"}}, "use one address of this machine, not a wildcard"),
        ({"pipes": {"clients": "http://x"}}, "'http://x' is not an endpoint"),
        ({"pipes": {"workers": "tcp://127.0.0.1:0", "keys": "keys"}}, "tcp:// needs keys"),
        ({"pipes": {"folder": f"/{'x' * 120}"}}, "an ipc path must be absolute and at most 107 bytes long"),
        ({"pipes": {"keys": "nowhere"}}, "nowhere/hub.key_secret cannot be read as a key"),
        ({"http": {"bind": "0.0.0.0:80"}}, "which others can reach: set http.token_file"),
        ({"latent_decoders": {16: {"vae": "/nowhere"}}}, "latent_decoders.16.vae: /nowhere/config.json cannot be read"),
    ],
)
def test_check_reports_the_errors_of_a_start(tmp_path, capsys, config, says):
    create_key_pair(tmp_path / "keys", "hub")
    path = write_config(tmp_path, {"rewards": {"color": {}}, **config})
    for options in (["--check"], []):
        assert serve.main([str(path), *options]) == 2
        assert says in capsys.readouterr().err


# Start and shutdown


@pytest.mark.parametrize(
    ("reward", "settings", "says"),
    [
        ("color", {"python": "/nowhere/python"}, "[Errno 2]"),
        pytest.param("probe_rewards:CannotLoad", {}, "the package rapidfoo is missing: pip", marks=pytest.mark.slow),
        pytest.param("probe_rewards:DiesLoading", {}, "its worker died (killed by SIGSEGV)", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_cannot_start_ends_the_service_with_its_error(tmp_path, reward, settings, says):
    config = {"rewards": {reward: settings, "probe_rewards:Other": {}}}
    with a_service(write_config(tmp_path, config)) as service:
        out, err = service.communicate(timeout=TIMEOUT_S)
    assert (service.returncode, out) == (2, "")
    assert f"error: reward {reward} cannot start: {says}" in err.splitlines()[-1]
    assert not (tmp_path / "pipes.json").exists()


def test_the_output_of_a_dead_worker_is_read(tmp_path):
    """The worker is dead before the supervisor checks its status."""
    name = "probe_rewards:CannotLoad"
    hub = Broker(clients=f"ipc://{tmp_path}/c", workers=f"ipc://{tmp_path}/w", kinds={})
    hub.start()
    with selectors.DefaultSelector() as selector:
        pool = worker_pool.WorkerPool(hub, {name: worker_pool.reward_program(name, RewardConfig())}, selector)
        try:
            pool.supervise(0.0)
            (state,) = pool.worker_states()
            os.waitid(os.P_PID, state.pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(RewardError, match="cannot start: the package rapidfoo is missing"):
                pool.supervise(1.0)
        finally:
            pool.stop()
            hub.stop(0.0)


@pytest.mark.slow
def test_the_service_writes_pipes_json_and_sigterm_removes_all_files(tmp_path):
    rewards = {"probe_rewards:Brightness": {"workers": 2}, "probe_rewards:Other": {}}
    config = write_config(tmp_path, {"pipes": {"file": "new/deep.json"}, "rewards": rewards})
    with a_service(config) as service:
        status = json.loads(service.stdout.readline())
        assert status == {"ready": sorted(rewards), "pipes": str(tmp_path / "new" / "deep.json")}
        pipes = Path(status["pipes"])
        assert stat.S_IMODE(pipes.stat().st_mode) == 0o600
        endpoint = json.loads(pipes.read_text())["clients"]
        sockets = Path(endpoint.removeprefix("ipc://")).parent
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        client = PipeClient(str(pipes), run="run", client="test")
        client.attach(TIMEOUT_S)
        assert set(client.kinds) == {f"score:{name}" for name in rewards}
        client.close()
        family = psutil.Process(service.pid).children(recursive=True)
        assert len(family) == 3
        service.send_signal(signal.SIGTERM)
        assert service.wait(TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert not sockets.exists()
    assert not pipes.exists()
