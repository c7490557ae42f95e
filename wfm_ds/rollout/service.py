"""The trainer's end of async rollouts, on rank 0: the hub that workers lease from, and the workers it starts itself."""

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
from wfm_ds.distributed.gpus import for_process, machine_gpus
from wfm_ds.distributed.world import free_port
from wfm_ds.errors import RecipeError
from wfm_ds.pipes.folders import SocketFolder
from wfm_ds.pipes.hub import Hub, Kind
from wfm_ds.pipes.keys import HubKeys, hub_keys
from wfm_ds.pipes.status import Ended
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardRecipe, RolloutRecipe
from wfm_ds.rollout import KIND
from wfm_ds.run.layout import ROLLOUT
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

PIPES = "pipes.json"
STOP_S = 20.0  # for a worker to leave
DRAIN_S = 2.0
MAX_DEATHS = 5
DEATHS_WINDOW_S = 600.0
# What a launcher tells its ranks; a worker is none.
OF_RANKS = re.compile(r"RANK|(LOCAL|GROUP|ROLE|CROSS)_.*|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|WFM_(LAUNCH|STATUS)_.*")


class RolloutService:
    """The hub in a thread of this process, `rollout/pipes.json` for those that join, and `rollout.spawn` children."""

    def __init__(self, recipe: Recipe, identity: Mapping[str, str], rewards: str, num_ranks: int) -> None:
        """`identity`: of this trainer's samples. `rewards`: address of the reward service. `num_ranks`: with which the
        workers share this machine.

        Raises PipeError if rollout.bind cannot be bound, KeyFileError if rollout.keys cannot be used, RecipeError for a
        device that has to be named, OSError if a file cannot be written or a child not started; nothing is left then.
        """
        self.recipe, self.settings, self.rewards = recipe, recipe.rl.rollout, rewards
        self.places = places(self.settings, num_ranks)
        self.threads = max(1, (os.cpu_count() or 1) // (num_ranks + max(1, self.settings.spawn)))
        self.folder = recipe.run.output_dir / ROLLOUT
        self.folder.mkdir(parents=True, exist_ok=True)
        self.endpoint = str((self.folder / PIPES).absolute())
        self._sockets = SocketFolder() if self.settings.bind == "ipc" else None
        self.children: list[Child] = []
        clients, workers = endpoints(self.settings.bind, None if self._sockets is None else self._sockets.path)
        info: dict[str, Any] = {"identity": dict(identity), "rewards": rewards, "workers": workers}
        try:
            self.hub = Hub(
                clients=clients,
                workers=workers,
                kinds={KIND: Kind(stall_s(self.settings, recipe.rl.reward), info)},
                silent_worker_s=self.settings.lost_after_s,
                keys=trainer_keys(self.settings),
                worker_keys=self.settings.keys is not None,
                observer=self._observe,
            )
        except BaseException:
            self._remove_sockets()
            raise
        self.hub.start()
        try:
            self._announce({"clients": self.hub.client_endpoint, "workers": workers, "pid": os.getpid()})
            for i in range(self.settings.spawn):
                self.children.append(Child(self, f"spawned-{i}", self.places[i % len(self.places)]))
        except BaseException:
            self.stop()
            raise

    def command(self, name: str, place: Place) -> list[str]:
        device = place.device if place.gpu is None else "cuda:0"  # the only one that it sees
        recipe, endpoint = str(self.recipe.run.output_dir / "recipe.yaml"), self.endpoint
        options = {"--connect": endpoint, "--rewards": self.rewards, "--device": device, "--name": name}
        words = [word for pair in options.items() for word in pair]
        return [sys.executable, "-m", "wfm_ds.rollout", recipe, *words, "--stop-on-eof"]

    def environment(self, gpu: str | None) -> dict[str, str]:
        """Environment of this process without the variables that make it a rank, and with this GPU alone if it has
        one."""
        kept = {name: value for name, value in os.environ.items() if not OF_RANKS.fullmatch(name)}
        own = {"OMP_NUM_THREADS": str(self.threads), **kept}
        return own if gpu is None else for_process(own, gpu)

    def failures(self) -> list[str]:
        """The reasons why children are not started again."""
        return [child.failure for child in self.children if child.failure]

    def alone(self) -> str:
        """The reason why nothing will ever be generated; "" if something may be."""
        lost = self.failures()
        hopeless = self.children and len(lost) == len(self.children) and not self.hub.workers()
        return "; ".join(dict.fromkeys(lost)) if hopeless else ""

    def stop(self) -> None:
        """End the children and the hub. May be called again."""
        for child in self.children:
            child.ask_to_stop()
        for child in self.children:
            child.stop()
        self.hub.stop(DRAIN_S)
        self._remove_sockets()
        Path(self.endpoint).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the logs of workers stay
            self.folder.rmdir()

    def _announce(self, content: Mapping[str, Any]) -> None:
        with atomic.new_file(Path(self.endpoint)) as part:
            part.chmod(0o600)
            part.write_text(json.dumps(content))

    def _observe(self, ended: Ended) -> None:
        """Note which child works. Called in the hub's thread."""
        if ended.completion.ok:
            for child in self.children:
                child.worked = child.worked or ended.completion.worker.startswith(f"{child.life}/")

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.remove()


class Child:
    """A worker on this machine; started again when it dies. It ends when this process does: its stdin closes."""

    def __init__(self, service: RolloutService, name: str, place: Place) -> None:
        self.service, self.name, self.place = service, name, place
        self.failure = ""  # why it is not started again
        self.log = service.folder / f"{name}.log"
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # nothing is started once stopping
        self.worked = False  # its process has finished a chunk
        self._life = 0
        self._process = self._started()
        self._watcher = threading.Thread(target=self._watch, name=name, daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The process id; another one after a restart."""
        return self._process.pid

    @property
    def life(self) -> str:
        """The name of its process; that of a lane is LIFE/NUMBER."""
        return f"{self.name}.{self._life}"

    def ask_to_stop(self) -> None:
        with self._lock:
            self._stopping.set()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        self.ask_to_stop()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("rollout worker %s did not stop within %.0f s and is killed", self.name, STOP_S)
            self._process.kill()
            self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        self._life, self.worked = self._life + 1, False
        with self.log.open("ab") as log_file:
            return subprocess.Popen(
                self.service.command(self.life, self.place),
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=self.service.environment(self.place.gpu),
                start_new_session=True,  # Ctrl-C is for the trainer
            )

    def _watch(self) -> None:
        deaths: deque[float] = deque()
        while True:
            status = self._process.wait()
            if self._stopping.is_set():
                return
            for lane in range(self.service.settings.in_flight):
                self.service.hub.worker_lost(f"{self.life}/{lane}", "its worker died")
            if self.worked:
                deaths.clear()  # only lives in which nothing was done speak against another one
            deaths.append(time.monotonic())
            while deaths[-1] - deaths[0] > DEATHS_WINDOW_S:
                deaths.popleft()
            if status == 0 and self.service.hub.dismissed:
                return
            if status == 2 or len(deaths) >= MAX_DEATHS:
                self.failure = f"rollout worker {self.name} {self._last_error(status)} (log: {self.log})"
                log.error("%s", self.failure)
                return
            log.warning("rollout worker %s died (exit status %d) and is started again", self.name, status)
            self._stopping.wait(2.0 ** (len(deaths) - 1))
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = self._started()

    def _last_error(self, status: int) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return f"cannot work: {errors[-1]}" if status == 2 and errors else f"keeps dying, last with status {status}"


def stall_s(rollout: RolloutRecipe, reward: RewardRecipe) -> float:
    """A chunk makes no progress while it waits for its turn on the device, behind the worker's others, or for its
    scores."""
    return max(1, rollout.in_flight - 1) * rollout.timeout_s + reward.timeout_s


@dataclass(frozen=True, slots=True)
class Place:
    """The device of a worker on this machine."""

    device: str  # as the recipe has it
    gpu: str | None = None  # what CUDA_VISIBLE_DEVICES calls it; None for one that is no GPU


def places(rollout: RolloutRecipe, num_ranks: int) -> list[Place]:
    """The places of the children, in turn, beside `num_ranks` training ranks of this machine. Raises RecipeError for
    GPUs that are not there, and where a guess could take memory from the ranks. Warns of a GPU that is a rank's too."""
    devices = spawn_devices(rollout.devices, rollout.spawn)[: max(1, rollout.spawn)]
    if not any(device.startswith("cuda") for device in devices):
        return [Place(device) for device in devices]
    gpus = machine_gpus(num_ranks)
    found = [Place(device, gpus.name(device)) for device in devices]
    shared = [place.device for place in found if place.gpu in gpus.of_ranks]
    if shared:  # the only way on a machine with one GPU
        log.warning(
            "rollout.devices: %s train too: rollouts and training slow each other down there, and share the memory",
            ", ".join(dict.fromkeys(shared)),
        )
    return found


def spawn_devices(named: list[str] | None, spawn: int) -> list[str]:
    """The devices of the children, in turn. Raises RecipeError where a guess could take memory from the ranks."""
    if named is not None or spawn == 0:
        return named or ["cpu"]
    if uses_cuda():
        raise RecipeError(
            "rollout.spawn: name the GPUs of the workers in rollout.devices, such as [cuda:6, cuda:7], and leave them "
            "out of the training ranks; or set spawn: 0 and start workers elsewhere"
        )
    return ["cpu"]


def trainer_keys(settings: RolloutRecipe) -> HubKeys | None:
    """The keys of the trainer's hub; None without rollout.keys. Ranks, and workers that the trainer starts, use its
    `insider`. Raises KeyFileError."""
    return None if settings.keys is None else hub_keys(settings.keys)


def endpoints(bind: str, folder: Path | None) -> tuple[str, str]:
    """The endpoints for clients (joining workers, ranks) and for leases. Raises RecipeError for a port without a next
    one."""
    if folder is not None:
        return f"ipc://{folder}/clients", f"ipc://{folder}/workers"
    host, _, port = bind.rpartition(":")
    if not port.isdecimal() or not int(port) < 65535:
        raise RecipeError(f"rollout.bind {bind}: write ipc, or tcp://HOST:PORT with a port from 1 to 65534, or 0")
    second = int(port) + 1 if int(port) else free_port()
    return bind, f"{host}:{second}"
