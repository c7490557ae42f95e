"""The trainer and the workers it starts: commands, environment, restarts. tests/faults tests real processes."""

import json
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from each_case import check_each
from wfm_ds.distributed import gpus
from wfm_ds.distributed.ranks import RANK_VARIABLES
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.remote import async_source, service
from wfm_ds.rollout.remote.identity import compute_identity, require_same_identity
from wfm_ds.rollout.remote.service import RolloutService, broker_endpoints, choose_worker_devices, chunk_stall_s
from wfm_ds.rollout.reward_service import RewardService, service_environment
from wfm_ds.training.preflight import check_workers
from wfm_ds.transport.keys import KeyFileError, create_key_pair
from wfm_ds.transport.socket_folders import SocketFolder

TINY = Path(__file__).parent.parent / "recipes"


def changed(**sections):
    plain = recipe_file.load_recipe(TINY / "sd3_nft_async.yaml").model_dump(mode="json")
    for name, keys in sections.items():
        plain[name] = {**plain[name], **keys}
    return Recipe.model_validate(plain)


@check_each(
    ("key", "value"),
    [
        ("max_staleness", 0),
        ("spawn", 3),
        ("devices", ["cpu"]),
        ("bind", "tcp://127.0.0.1:6200"),
        ("in_flight", 4),
        ("worker_timeout_s", 5),
        ("keys", Path("keys")),
        ("timeout_s", 5),
    ],
)
def test_keys_about_workers_need_them(key, value):
    more = {"bind": "tcp://10.0.0.1:6200"} if key == "keys" else {}
    assert getattr(changed(rollout={key: value, **more}).rollout, key) == value
    with pytest.raises(ValueError, match=rf"rollout.mode: colocated does not read rollout.*{key}.*set mode: async"):
        changed(rollout={"mode": "colocated", "max_staleness": 1, "spawn": 1, key: value, **more})


@check_each(("in_flight", "ahead"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_the_timeout_of_a_chunk_covers_the_workers_earlier_chunks(in_flight, ahead):
    recipe = changed(rollout={"in_flight": in_flight, "timeout_s": 100}, reward={"timeout_s": 7})
    assert chunk_stall_s(recipe.rollout, recipe.reward) == ahead * 100 + 7


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start a service with child processes. After the test, its socket folder and its threads must be gone."""
    sockets = []

    def folder():
        sockets.append(SocketFolder())
        return sockets[-1]

    def start(*commands):
        monkeypatch.setattr(service, "SocketFolder", folder)
        programs = {f"spawned-{i}.1": command for i, command in enumerate(commands)}
        monkeypatch.setattr(RolloutService, "worker_command", lambda self, life, device: programs[life])
        recipe = changed(run={"output_dir": str(tmp_path)}, rollout={"spawn": len(commands), "devices": ["cpu"]})
        return RolloutService(recipe, {}, "", 1)

    before = set(threading.enumerate())
    yield start
    assert sockets
    assert not sockets[0].path.exists()
    assert {t.name for t in set(threading.enumerate()) - before if not t.name.startswith("spawned-")} == set()


QUIET = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_a_child_that_cannot_be_started_leaves_no_broker_and_no_other_child(started, tmp_path):
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        started(QUIET, ["/no-such-program"])
    assert {process.pid for process in psutil.Process().children()} <= before
    assert not (tmp_path / "rollout" / "pipes.json").exists()


def test_a_service_that_cannot_be_announced_leaves_no_broker(started, tmp_path):
    (tmp_path / "rollout" / "pipes.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        started(QUIET)


@check_each(
    ("overrides", "message"),
    [
        ([], "needs on-policy samples unless the rollout policy is fixed: set rollout.max_staleness: 0"),
        (
            ["rollout.max_staleness=0", "data.buckets=auto"],
            "async generates samples of a single size: remove data.buckets",
        ),
        (
            ["rollout.policy=reference", "algorithm.kl_beta=.1", "algorithm.update_ref_every=2"],
            "unless the rollout policy is fixed",
        ),
        (["rollout.policy=reference", "algorithm.kl_beta=.1"], None),
    ],
)
def test_workers_of_ddrl_need_on_policy_samples_or_a_fixed_rollout_policy(overrides, message):
    words = ["rollout.mode=async", *overrides]
    if message is None:
        assert recipe_file.load_recipe(TINY / "sd3_ddrl.yaml", words).is_async
        return
    with pytest.raises(RecipeError, match=message):
        recipe_file.load_recipe(TINY / "sd3_ddrl.yaml", words)


def test_a_tcp_address_takes_the_next_port_too(tmp_path):
    assert broker_endpoints("tcp://127.0.0.1:6200", None) == ("tcp://127.0.0.1:6200", "tcp://127.0.0.1:6201")
    assert broker_endpoints("ipc", tmp_path) == (f"ipc://{tmp_path}/clients", f"ipc://{tmp_path}/workers")
    for wrong in ("tcp://127.0.0.1", "tcp://127.0.0.1:65535", "loopback"):
        with pytest.raises(RecipeError, match="a port from 0 to 65534"):
            broker_endpoints(wrong, None)


def test_devices_are_named_where_a_guess_could_take_a_ranks(monkeypatch):
    def names(devices, spawn):
        settings = changed(rollout={"devices": devices, "spawn": spawn}).rollout
        return [place.device for place in choose_worker_devices(settings, 1)]

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert names(None, 1) == ["cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert names(None, 0) == names(["cuda:6"], 0) == ["cpu"]
    with pytest.raises(RecipeError, match=r"rollout\.spawn needs rollout\.devices"):
        names(None, 1)


def test_workers_do_not_inherit_rank_variables():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "WFM_LAUNCH_PID", "TORCHELASTIC_RUN_ID"):
        assert RANK_VARIABLES.fullmatch(name)
    for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID"):
        assert RANK_VARIABLES.fullmatch(name)
    for name in ("PATH", "OMP_NUM_THREADS", "REMOTE_REWARD_TOKEN", "HF_HUB_OFFLINE", "SLURM_JOB_ID"):
        assert not RANK_VARIABLES.fullmatch(name)


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine with `number` GPUs and the environment variables of a launcher."""

    def make(number, visible=None, note=None):
        for name, value in {"CUDA_VISIBLE_DEVICES": visible, "WFM_LAUNCH_GPUS": note, "DS_ACCELERATOR": None}.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        # The script that counts GPUs in a new process.
        listed = f"v = os.environ.get('CUDA_VISIBLE_DEVICES'); print({number} if v is None else len(v.split(',')))"
        monkeypatch.setattr(gpus, "COUNT_SCRIPT", f"import os; {listed}")

    gpus._list_gpus.cache_clear()
    yield make
    gpus._list_gpus.cache_clear()


def gpus_of(devices, num_ranks, spawn=None):
    settings = changed(rollout={"devices": devices, "spawn": len(devices) if spawn is None else spawn}).rollout
    return [place.gpu for place in choose_worker_devices(settings, num_ranks)]


@pytest.mark.parametrize(
    ("visible", "note", "devices", "num_ranks", "theirs"),
    [
        # deepspeed --num_gpus 6 on a machine with eight GPUs: the ranks see six
        ("0,1,2,3,4,5", "all", ["cuda:6", "cuda:7"], 6, ["6", "7"]),
        # CUDA_VISIBLE_DEVICES=2,3,4 deepspeed --num_gpus 2
        ("2,3", "2,3,4", ["cuda:2"], 2, ["4"]),
        # a launcher that sets no WFM_LAUNCH_GPUS
        ("GPU-a, GPU-b", None, ["cuda:1"], 1, ["GPU-b"]),
        ("MIG-1,MIG-2", "MIG-1,MIG-2", ["cuda:1"], 1, ["MIG-2"]),
        (None, None, ["cuda:1"], 1, ["1"]),
        ("0", "all", ["cpu", "cuda:1"], 1, [None, "1"]),
    ],
)
def test_a_workers_gpu_is_counted_among_all_of_the_run(machine, caplog, visible, note, devices, num_ranks, theirs):
    machine(8, visible, note)
    assert gpus_of(devices, num_ranks) == theirs
    assert not caplog.records


@pytest.mark.parametrize(
    ("visible", "note", "device", "says"),
    [
        ("0,1", "all", "cuda:8", r"cuda:8 does not exist: the run's GPUs on this machine are cuda:0 to cuda:7$"),
        ("2,3", "2,3,4", "cuda:4", r"the run's GPUs on this machine are cuda:0 to cuda:2$"),
        ("5", None, "cuda:6", r"the run's GPUs on this machine are cuda:0$"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(machine, visible, note, device, says):
    machine(8, visible, note)
    with pytest.raises(RecipeError, match=says):
        gpus_of([device], 2)


def test_the_error_of_a_rank_started_over_ssh_says_how_to_see_all_gpus(machine, monkeypatch):
    machine(8, "0,1")
    for name, value in {"CROSS_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=r"over ssh, add WFM_LAUNCH_GPUS=all to ~/\.deepspeed_env"):
        gpus_of(["cuda:7"], 2)


def test_a_worker_on_a_training_gpu_causes_a_warning(machine, caplog, monkeypatch):
    machine(1, "0", "all")
    assert gpus_of(["cuda:0"], 1) == ["0"]
    assert "cuda:0 are also used for training" in caplog.text
    caplog.clear()
    assert gpus_of(["cpu", "cuda:0"], 1, spawn=1) == [None]  # only one worker is spawned
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert gpus_of(["cuda:0"], 1) == ["0"]  # the ranks compute on the CPU
    assert not caplog.records


def reward_recipe(*devices):
    return RewardRecipe(functions=[{"name": f"color/{i}", "device": device} for i, device in enumerate(devices)])


@pytest.mark.parametrize(
    ("visible", "note", "device", "seen"),
    [
        ("0,1,2,3,4,5", "all", "cuda:7", None),
        ("2,3", "2,3,4", "cuda:2", "2,3,4"),
        ("GPU-a,GPU-b", None, "cuda:1", "GPU-a,GPU-b"),
        ("0,1", "all", "cpu", "0,1"),
    ],
)
def test_rewards_on_gpus_see_all_of_the_run(machine, caplog, visible, note, device, seen):
    machine(8, visible, note)
    num_ranks = 1 if note is None else 2
    assert service_environment(reward_recipe("cpu", device), num_ranks).get("CUDA_VISIBLE_DEVICES") == seen
    assert not caplog.records


def test_a_reward_on_a_training_gpu_causes_a_warning_and_a_missing_gpu_is_refused(machine, caplog, tmp_path):
    machine(8, "0,1", "all")
    service_environment(reward_recipe("cuda:1", "cuda:2"), 2)
    assert "reward devices: cuda:1 (color/0) also used for training" in caplog.text
    with pytest.raises(RecipeError, match=r"^device of reward color/0: cuda:8 does not exist: the run's GPUs on this"):
        RewardService(reward_recipe("cuda:8"), tmp_path / "service")
    assert not (tmp_path / "service").exists()


def test_a_device_is_read_from_the_recipe_only_if_the_trainer_starts_the_service():
    for device in ("7", "cuda:", "cuda:a", ""):
        with pytest.raises(ValueError, match="device"):
            reward_recipe(device)
    with pytest.raises(ValueError, match=r"device: only read with reward\.spawn: true"):
        RewardRecipe(functions=[{"name": "color", "device": "cuda:1"}], spawn=False, endpoint="ipc:///x")


def test_the_threads_of_workers_depend_on_the_ranks_of_this_machine(monkeypatch):
    """Two machines with two ranks each."""
    ranks = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "MASTER_ADDR": "node-a"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    counted = []

    class Started(UserError):
        pass

    def start(recipe, identity, rewards, num_ranks):
        counted.append(num_ranks)
        raise Started

    monkeypatch.setattr(async_source, "RolloutService", start)
    monkeypatch.setattr(async_source, "compute_identity", lambda recipe, model: {})
    world = SimpleNamespace(size=4, run_checked=lambda work, on="all": work())
    job = SimpleNamespace(world=world, recipe=changed(), model=None)
    with pytest.raises(Started):
        async_source.start_async_source(job, None, None, "", ExitStack())
    assert counted == [2]


PRINTS = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]), flush=True); sys.stdin.read()"


def test_a_worker_sees_only_its_gpu_as_device_0(machine, monkeypatch, tmp_path):
    machine(3, "0,1", "all")
    monkeypatch.setenv("RANK", "0")
    started = RolloutService.worker_command

    def command(self, life, place):
        return [sys.executable, "-c", PRINTS, *started(self, life, place)[3:]]

    monkeypatch.setattr(RolloutService, "worker_command", command)
    recipe = changed(run={"output_dir": str(tmp_path)}, rollout={"spawn": 2, "devices": ["cuda:2", "cpu"]})
    service = RolloutService(recipe, {}, "", 2)
    try:
        logs = [tmp_path / "rollout" / f"spawned-{i}.log" for i in range(2)]
        until_s = time.monotonic() + 30.0
        while not all(log.read_text().endswith("\n") for log in logs):
            assert time.monotonic() < until_s
            threading.Event().wait(0.05)
        (on_gpu, its_words), (on_cpu, cpu_words) = (json.loads(log.read_text()) for log in logs)
    finally:
        service.stop()
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "2"
    assert its_words[its_words.index("--device") + 1] == "cuda:0"
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert cpu_words[cpu_words.index("--device") + 1] == "cpu"
    assert not {"RANK", "WFM_LAUNCH_GPUS"} & (on_gpu.keys() | on_cpu.keys())


def test_a_worker_with_another_recipe_or_pipeline_is_refused_by_name(tiny_pipelines):
    from wfm_ds.models import registry

    path = tiny_pipelines("sd3")
    model = registry.load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))
    here = compute_identity(changed(), model)
    require_same_identity(here, compute_identity(changed(model={"path": "elsewhere"}, rollout={"spawn": 5}), model))
    for section, keys in (("sampling", {"steps": 5}), ("lora", {"rank": 2}), ("algorithm", {"beta": 0.5})):
        with pytest.raises(RecipeError, match=f"this worker's {section} differ"):
            require_same_identity(here, compute_identity(changed(**{section: keys}), model))
    with pytest.raises(RecipeError, match=r"run\.seed"):
        require_same_identity(here, compute_identity(changed(run={"seed": 9}), model))
    with pytest.raises(RecipeError, match="pipeline"):
        require_same_identity(here, here | {"pipeline": "another"})


def test_workers_that_cannot_be_reached_are_refused_before_the_run():
    check_workers(changed())
    for host in ("127.0.0.1", "10.0.0.1"):
        with pytest.raises(UserError, match=rf"tcp://{host}:6200: tcp:// needs keys"):
            check_workers(changed(rollout={"bind": f"tcp://{host}:6200"}))
    with pytest.raises(RecipeError, match="a port from 0 to 65534"):
        check_workers(changed(rollout={"bind": "tcp"}))


def test_network_addresses_need_keys_and_keys_need_a_network_address(tmp_path):
    elsewhere = {"bind": "tcp://10.0.0.1:6200", "keys": tmp_path / "keys"}
    with pytest.raises(KeyFileError, match=r"keys/hub\.key_secret cannot be read as a key"):
        check_workers(changed(rollout=elsewhere))
    create_key_pair(tmp_path / "keys", "hub")
    check_workers(changed(rollout=elsewhere))
    with pytest.raises(UserError, match="use one address of this machine, not a wildcard"):
        check_workers(changed(rollout=elsewhere | {"bind": "tcp://0.0.0.0:6200"}))
    with pytest.raises(ValueError, match="keys needs a tcp:// address"):
        changed(rollout={"keys": tmp_path / "keys"})
