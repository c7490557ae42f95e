"""The part of async rollouts that runs on rank 0: the broker, which gives tasks to workers, and local workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.distributed.gpus import find_machine_gpus, gpu_environment
from wfm_ds.distributed.world import find_free_port
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardRecipe, RolloutRecipe
from wfm_ds.rollout import TASK_KIND
from wfm_ds.runs.layout import ROLLOUT
from wfm_ds.storage import atomic
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.keys import BrokerKeys, load_broker_keys
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.tasks import FinishedTask

log = logging.getLogger(__name__)

PIPES_FILE = "pipes.json"
STOP_S = 20.0  # for a worker to exit
DRAIN_S = 2.0
MAX_DEATHS = 5
DEATHS_WINDOW_S = 600.0
# Set by launchers for their ranks; removed from the environment of workers.
RANK_VARIABLES = re.compile(
    r"RANK|(LOCAL|GROUP|ROLE|CROSS)_.*|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|WFM_(LAUNCH|STATUS)_.*"
)


class RolloutService:
    """Runs the broker in a thread of this process, and starts `rollout.spawn` worker processes.

    It also writes the broker's addresses to `rollout/pipes.json`. Workers that are started elsewhere read this file.
    """

    def __init__(self, recipe: Recipe, identity: Mapping[str, str], rewards: str, num_ranks: int) -> None:
        """Start the broker and the workers. If an error occurs, stop those that already run.

        identity: result of `compute_identity` on the trainer.
        rewards: address of the reward service.
        num_ranks: number of training ranks on this machine.
        Raises PipeError if rollout.bind cannot be bound, KeyFileError if rollout.keys is unusable, RecipeError if
        rollout.devices is missing or invalid, and OSError if a file cannot be written or a worker cannot be started.
        """
        self.recipe, self.settings, self.rewards = recipe, recipe.rl.rollout, rewards
        self.devices = choose_worker_devices(self.settings, num_ranks)
        self.num_threads = max(1, (os.cpu_count() or 1) // (num_ranks + max(1, self.settings.spawn)))
        self.folder = recipe.run.output_dir / ROLLOUT
        self.folder.mkdir(parents=True, exist_ok=True)
        self.endpoint = str((self.folder / PIPES_FILE).absolute())
        self._sockets = SocketFolder() if self.settings.bind == "ipc" else None
        self.workers: list[WorkerProcess] = []
        clients, workers = broker_endpoints(self.settings.bind, None if self._sockets is None else self._sockets.path)
        info: dict[str, Any] = {"identity": dict(identity), "rewards": rewards, "workers": workers}
        try:
            self.broker = Broker(
                clients=clients,
                workers=workers,
                kinds={TASK_KIND: TaskKind(chunk_stall_s(self.settings, recipe.rl.reward), info)},
                worker_timeout_s=self.settings.worker_timeout_s,
                keys=load_trainer_keys(self.settings),
                worker_keys=self.settings.keys is not None,
                observer=self._record_finished_chunk,
            )
        except BaseException:
            self._remove_sockets()
            raise
        self.broker.start()
        try:
            self._write_endpoints({"clients": self.broker.client_endpoint, "workers": workers, "pid": os.getpid()})
            for i in range(self.settings.spawn):
                self.workers.append(WorkerProcess(self, f"spawned-{i}", self.devices[i % len(self.devices)]))
        except BaseException:
            self.stop()
            raise

    def worker_command(self, name: str, place: WorkerDevice) -> list[str]:
        name_in_worker = place.device if place.gpu is None else "cuda:0"  # the only GPU that the worker sees
        recipe, endpoint = str(self.recipe.run.output_dir / "recipe.yaml"), self.endpoint
        options = {"--connect": endpoint, "--rewards": self.rewards, "--device": name_in_worker, "--name": name}
        arguments = [argument for option in options.items() for argument in option]
        return [sys.executable, "-m", "wfm_ds", "rollout", recipe, *arguments, "--stop-on-eof"]

    def worker_environment(self, gpu: str | None) -> dict[str, str]:
        """Return a worker's environment variables.

        gpu: the only GPU that the worker may use. If it is None, the worker may use the same GPUs as this process.
        """
        inherited = {name: value for name, value in os.environ.items() if not RANK_VARIABLES.fullmatch(name)}
        variables = {"OMP_NUM_THREADS": str(self.num_threads), **inherited}
        return variables if gpu is None else gpu_environment(variables, gpu)

    def worker_failures(self) -> list[str]:
        """Return one failure message for each worker that failed and will not be restarted."""
        return [worker.failure for worker in self.workers if worker.failure]

    def failure_reason(self) -> str:
        """Return the failure messages if all workers have failed and no worker is connected. Otherwise returns ""."""
        failures = self.worker_failures()
        is_dead = self.workers and len(failures) == len(self.workers) and not self.broker.worker_ids()
        return "; ".join(dict.fromkeys(failures)) if is_dead else ""

    def stop(self) -> None:
        """Stop the workers and the broker. Repeated calls are allowed."""
        for worker in self.workers:
            worker.request_stop()
        for worker in self.workers:
            worker.stop()
        self.broker.stop(DRAIN_S)
        self._remove_sockets()
        Path(self.endpoint).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: the workers' logs are kept
            self.folder.rmdir()

    def _write_endpoints(self, content: Mapping[str, Any]) -> None:
        with atomic.new_file(Path(self.endpoint)) as part:
            part.chmod(0o600)
            part.write_text(json.dumps(content))

    def _record_finished_chunk(self, ended: FinishedTask) -> None:
        """Record which worker finished a chunk. The broker's thread calls this."""
        if ended.completion.ok:
            for worker in self.workers:
                worker.has_finished_chunk = worker.has_finished_chunk or ended.completion.worker.startswith(
                    f"{worker.process_name}/"
                )

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.remove()


class WorkerProcess:
    """A rollout worker process on this machine.

    The worker is restarted when it dies. It exits when its stdin is closed.
    """

    def __init__(self, service: RolloutService, name: str, device: WorkerDevice) -> None:
        self.service, self.name, self.device = service, name, device
        self.failure = ""  # why it is not restarted
        self.log_path = service.folder / f"{name}.log"
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # prevents a restart after a stop request
        self.has_finished_chunk = False  # since the last start
        self._num_starts = 0
        self._process = self._start_process()
        self._watcher = threading.Thread(target=self._watch_process, name=name, daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def process_name(self) -> str:
        """Name of the current process. Its threads (lanes) are named `<process name>/<number>`."""
        return f"{self.name}.{self._num_starts}"

    def request_stop(self) -> None:
        with self._lock:
            self._stopping.set()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        self.request_stop()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("rollout worker %s did not stop within %.0f s: killing it", self.name, STOP_S)
            self._process.kill()
            self._process.wait()

    def _start_process(self) -> subprocess.Popen[bytes]:
        self._num_starts, self.has_finished_chunk = self._num_starts + 1, False
        with self.log_path.open("ab") as log_file:
            return subprocess.Popen(
                self.service.worker_command(self.process_name, self.device),
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=self.service.worker_environment(self.device.gpu),
                start_new_session=True,  # keeps Ctrl-C from the worker
            )

    def _watch_process(self) -> None:
        deaths: deque[float] = deque()
        while True:
            status = self._process.wait()
            if self._stopping.is_set():
                return
            for lane in range(self.service.settings.in_flight):
                self.service.broker.report_lost_worker(f"{self.process_name}/{lane}", "its worker died")
            if self.has_finished_chunk:
                deaths.clear()  # only deaths without a finished chunk count against a restart
            deaths.append(time.monotonic())
            while deaths[-1] - deaths[0] > DEATHS_WINDOW_S:
                deaths.popleft()
            if status == 0 and self.service.broker.workers_dismissed:
                return
            if status == 2 or len(deaths) >= MAX_DEATHS:
                self.failure = f"rollout worker {self.name} {self._last_error(status)} (log: {self.log_path})"
                log.error("%s", self.failure)
                return
            log.warning("rollout worker %s died (exit status %d): restarting it", self.name, status)
            self._stopping.wait(2.0 ** (len(deaths) - 1))
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = self._start_process()

    def _last_error(self, status: int) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return f"failed: {errors[-1]}" if status == 2 and errors else f"died repeatedly, last exit status {status}"


def chunk_stall_s(rollout: RolloutRecipe, reward: RewardRecipe) -> float:
    """Return the number of seconds without progress after which a chunk counts as stalled.

    The result includes the time that a chunk may wait for its scores.
    """
    return max(1, rollout.in_flight - 1) * rollout.timeout_s + reward.timeout_s


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    device: str  # as in the recipe
    gpu: str | None = None  # its name in CUDA_VISIBLE_DEVICES; None if it is not a GPU


def choose_worker_devices(rollout: RolloutRecipe, num_ranks: int) -> list[WorkerDevice]:
    """Return the devices for workers. Worker k uses device k modulo the number of devices.

    num_ranks: number of training ranks on this machine. Raises RecipeError if a GPU does not exist, or if
    rollout.devices is required but not set. Logs a warning if a GPU is also used for training.
    """
    names = spawn_device_names(rollout.devices, rollout.spawn)[: max(1, rollout.spawn)]
    if not any(name.startswith("cuda") for name in names):
        return [WorkerDevice(name) for name in names]
    gpus = find_machine_gpus(num_ranks)
    devices = [WorkerDevice(name, gpus.visible_name(name, "rollout.devices")) for name in names]
    shared = [device.device for device in devices if device.gpu in gpus.training_gpus]
    if shared:  # unavoidable on a machine with one GPU
        log.warning(
            "rollout.devices: %s are also used for training: rollouts and training share their memory and slow each "
            "other down",
            ", ".join(dict.fromkeys(shared)),
        )
    return devices


def spawn_device_names(devices: list[str] | None, spawn: int) -> list[str]:
    """Return the device names for the workers on this machine. The default is the CPU.

    Raises RecipeError if rollout.devices is not set on a machine with GPUs, because a training rank may use any GPU.
    """
    if devices is not None or spawn == 0:
        return devices or ["cpu"]
    if uses_cuda():
        raise RecipeError(
            "rollout.spawn needs rollout.devices: set it to GPUs that do not train, such as [cuda:6, cuda:7], or set "
            "rollout.spawn to 0 and start workers elsewhere"
        )
    return ["cpu"]


def load_trainer_keys(settings: RolloutRecipe) -> BrokerKeys | None:
    """Load the encryption keys of the broker. Returns None if rollout.keys is not set.

    Raises KeyFileError if the keys are unusable.
    """
    return None if settings.keys is None else load_broker_keys(settings.keys)


def broker_endpoints(bind: str, folder: Path | None) -> tuple[str, str]:
    """Return two broker addresses. Ranks and new workers connect to the first, workers lease chunks at the second.

    folder: folder of ipc sockets. If it is None, the broker uses TCP, and leasing uses the next port. Raises
    RecipeError if rollout.bind is invalid.
    """
    if folder is not None:
        return f"ipc://{folder}/clients", f"ipc://{folder}/workers"
    host, _, port = bind.rpartition(":")
    if not port.isdecimal() or not int(port) < 65535:
        raise RecipeError(f"rollout.bind: expected ipc or tcp://HOST:PORT with a port from 0 to 65534, got {bind}")
    second = int(port) + 1 if int(port) else find_free_port()
    return bind, f"{host}:{second}"
