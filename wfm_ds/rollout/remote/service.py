"""Runs the broker of async rollouts and local rollout workers on rank 0."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.distributed.accelerator import find_free_port, uses_cuda
from wfm_ds.distributed.gpus import VISIBLE_DEVICES, find_machine_gpus
from wfm_ds.distributed.ranks import remove_rank_variables
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.rollout import RolloutRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.child_process import RestartingProcess, read_last_error
from wfm_ds.runs.layout import ROLLOUT
from wfm_ds.storage import atomic
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.keys import BrokerKeys, load_broker_keys
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.tasks import FinishedTask

log = logging.getLogger(__name__)

PIPES_FILE = "pipes.json"
DRAIN_S = 2.0
MAX_DEATHS = 5


class RolloutService:
    """Runs the broker in a thread, and `rollout.spawn` workers. Writes rollout/pipes.json for workers elsewhere."""

    def __init__(self, recipe: Recipe, identity: Mapping[str, str], rewards: str, num_ranks: int) -> None:
        """Start the broker and the workers. If one of them cannot be started, stop the others.

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
        self.workers: list[WorkerProcess] = []
        with contextlib.ExitStack() as resources:
            sockets = resources.enter_context(SocketFolder()) if self.settings.bind == "ipc" else None
            clients, workers = broker_endpoints(self.settings.bind, sockets)
            info: dict[str, Any] = {"identity": dict(identity), "rewards": rewards, "workers": workers}
            self.broker = Broker(
                clients=clients,
                workers=workers,
                kinds={TASK_KIND: TaskKind(chunk_stall_s(self.settings, recipe.rl.reward), info)},
                worker_timeout_s=self.settings.worker_timeout_s,
                keys=load_trainer_keys(self.settings),
                worker_keys=self.settings.keys is not None,
                observer=self._record_finished_chunk,
            )
            self.broker.start()
            resources.callback(self._remove_files)
            resources.callback(self.broker.stop, DRAIN_S)
            resources.callback(self._stop_workers)
            with atomic.new_file(Path(self.endpoint)) as part:
                part.chmod(0o600)
                endpoints = {"clients": self.broker.client_endpoint, "workers": workers, "pid": os.getpid()}
                part.write_text(json.dumps(endpoints))
            for i in range(self.settings.spawn):
                self.workers.append(WorkerProcess(self, f"spawned-{i}", self.devices[i % len(self.devices)]))
            self._resources = resources.pop_all()

    def worker_command(self, name: str, place: WorkerDevice) -> list[str]:
        name_in_worker = place.device if place.gpu is None else "cuda:0"  # the only GPU that the worker sees
        recipe, endpoint = str(self.recipe.run.output_dir / "recipe.yaml"), self.endpoint
        options = {"--connect": endpoint, "--rewards": self.rewards, "--device": name_in_worker, "--name": name}
        arguments = [argument for option in options.items() for argument in option]
        return [sys.executable, "-m", "wfm_ds", "rollout", recipe, *arguments, "--stop-on-eof"]

    def worker_environment(self, gpu: str | None) -> dict[str, str]:
        """Return a worker's environment variables. gpu: the only GPU that it sees. None: all GPUs of this process."""
        variables = {"OMP_NUM_THREADS": str(self.num_threads), **remove_rank_variables(os.environ)}
        return variables if gpu is None else {**variables, VISIBLE_DEVICES: gpu}

    def worker_failures(self) -> list[str]:
        return [worker.failure for worker in self.workers if worker.failure]

    def failure_reason(self) -> str:
        failures = self.worker_failures()
        is_dead = self.workers and len(failures) == len(self.workers) and not self.broker.worker_ids()
        return "; ".join(dict.fromkeys(failures)) if is_dead else ""

    def stop(self) -> None:
        self._resources.close()

    def _stop_workers(self) -> None:
        for worker in self.workers:
            worker.child.request_stop()
        for worker in self.workers:
            worker.child.stop()

    def _remove_files(self) -> None:
        Path(self.endpoint).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: the workers' logs are kept
            self.folder.rmdir()

    def _record_finished_chunk(self, ended: FinishedTask) -> None:
        if ended.completion.ok:
            for worker in self.workers:
                worker.has_finished_chunk |= ended.completion.worker.startswith(f"{worker.process_name}/")


class WorkerProcess:
    """A rollout worker process on this machine. It is restarted when it dies."""

    def __init__(self, service: RolloutService, name: str, device: WorkerDevice) -> None:
        self.service, self.name, self.device = service, name, device
        self.failure = ""  # why it is not restarted
        self.log_path = service.folder / f"{name}.log"
        self.has_finished_chunk = False  # since the last start
        self._num_starts = 0
        self.child = RestartingProcess(f"rollout worker {name}", self._start_process, self._should_restart)
        self.child.watch()

    @property
    def process_name(self) -> str:
        return f"{self.name}.{self._num_starts}"

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

    def _should_restart(self, status: int, deaths: deque[float]) -> bool:
        broker = self.service.broker
        for lane in range(self.service.settings.in_flight):
            broker.report_lost_worker(f"{self.process_name}/{lane}", "its worker died")
        while self.has_finished_chunk and len(deaths) > 1:
            deaths.popleft()  # only deaths without a finished chunk count against a restart
        if status == 0 and broker.workers_dismissed:
            return False
        if status == 2 or len(deaths) >= MAX_DEATHS:
            error = read_last_error(self.log_path) if status == 2 else ""
            reason = f"failed: {error}" if error else f"died repeatedly, last exit status {status}"
            self.failure = f"{self.child.name} {reason} (log: {self.log_path})"
            log.error("%s", self.failure)
        return not self.failure


def chunk_stall_s(rollout: RolloutRecipe, reward: RewardRecipe) -> float:
    """Return after how many seconds without progress a chunk goes to another worker.

    A chunk makes no progress while its worker denoises other chunks, and while it waits for its scores.
    """
    return max(1, rollout.in_flight - 1) * rollout.timeout_s + reward.timeout_s


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    device: str  # as in the recipe
    gpu: str | None = None  # its name in CUDA_VISIBLE_DEVICES; None if it is not a GPU


def choose_worker_devices(rollout: RolloutRecipe, num_ranks: int) -> list[WorkerDevice]:
    """Return the devices; worker k uses device k modulo their number. num_ranks: training ranks on this machine.

    Raises RecipeError if a GPU does not exist, or if rollout.devices is required but not set.
    """
    if rollout.spawn and rollout.devices is None and uses_cuda():
        raise RecipeError(
            "rollout.spawn needs rollout.devices: set it to GPUs that do not train, such as [cuda:6, cuda:7], or set "
            "rollout.spawn to 0 and start workers elsewhere"
        )
    names = (rollout.devices or ["cpu"])[: rollout.spawn] or ["cpu"]
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


def load_trainer_keys(settings: RolloutRecipe) -> BrokerKeys | None:
    """Return the broker's keys, or None if rollout.keys is not set. Raises KeyFileError if the keys are unusable."""
    return None if settings.keys is None else load_broker_keys(settings.keys)


def broker_endpoints(bind: str, folder: Path | None) -> tuple[str, str]:
    """Return the addresses for clients and workers. Raises RecipeError if `bind` is invalid.

    folder: folder for ipc sockets. None: both are TCP addresses.
    """
    if folder is not None:
        return f"ipc://{folder}/clients", f"ipc://{folder}/workers"
    host, _, port = bind.rpartition(":")
    if not port.isdecimal() or not int(port) < 65535:
        raise RecipeError(f"rollout.bind: expected ipc or tcp://HOST:PORT with a port from 0 to 65534, got {bind}")
    second = int(port) + 1 if int(port) else find_free_port()
    return bind, f"{host}:{second}"
