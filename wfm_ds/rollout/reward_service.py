"""Runs the rewards in a separate process, because a reward may hang, crash or need separate packages."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from wfm_ds.distributed.gpus import find_machine_gpus, run_gpu_environment
from wfm_ds.distributed.progress import show_wait
from wfm_ds.errors import RewardError
from wfm_ds.program import block_job_signals
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.child_process import RestartingProcess, read_last_error
from wfm_ds.transport.socket_folders import SocketFolder

log = logging.getLogger(__name__)

MAX_RESTARTS = 5


class RewardService:
    """Runs `wfm serve` in a child process, and restarts it when it dies. The child exits when this process exits."""

    def __init__(self, reward: RewardRecipe, folder: Path, num_ranks: int = 0) -> None:
        """Start the service and wait until all rewards are loaded.

        Writes reward_service.yaml, reward_service.log and pipes.json to `folder`. num_ranks: number of training ranks
        on this machine. Raises RewardError if the service fails to start or is not ready within reward.start_timeout_s,
        and RecipeError if a GPU does not exist.
        """
        self._environment = service_environment(reward, num_ranks)
        self.endpoint = str(folder / "pipes.json")
        self._config_path = folder / "reward_service.yaml"
        self._log_path = folder / "reward_service.log"
        self._sockets = SocketFolder()
        folder.mkdir(parents=True, exist_ok=True)
        Path(self.endpoint).unlink(missing_ok=True)
        self._config_path.write_text(yaml.safe_dump(build_service_config(reward, self._sockets.path), sort_keys=False))
        self._log_path.write_bytes(b"")
        self.child = RestartingProcess("the reward service", self._start_process, self._should_restart)
        try:
            self._wait_until_ready(reward.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.child.watch()

    def __enter__(self) -> RewardService:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def stop(self) -> None:
        self.child.stop()
        self._sockets.remove()
        Path(self.endpoint).unlink(missing_ok=True)

    def _start_process(self) -> subprocess.Popen[bytes]:
        self._sockets.restore()
        with self._log_path.open("ab") as log_file, block_job_signals():
            return subprocess.Popen(
                [sys.executable, "-m", "wfm_reward.serve", str(self._config_path), "--stop-on-eof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=self._environment,
                start_new_session=True,  # keeps Ctrl-C from the service: the trainer needs it to finish its step
            )

    def _wait_until_ready(self, timeout_s: float) -> None:
        process = self.child.process
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector, show_wait("starting the rewards"):
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise RewardError(f"the reward service was not ready after {timeout_s:g} s (log: {self._log_path})")
            line = process.stdout.readline()
        if not line:
            error = read_last_error(self._log_path) or f"the reward service exited with status {process.wait()}"
            raise RewardError(f"{error} (log: {self._log_path})")

    def _should_restart(self, status: int, deaths: Sequence[float]) -> bool:
        if len(deaths) > MAX_RESTARTS:
            log.error("the reward service died %d times: not restarting it", len(deaths))
        return len(deaths) <= MAX_RESTARTS


def build_service_config(reward: RewardRecipe, sockets: Path) -> dict[str, Any]:
    """Return the content of reward_service.yaml. Raises RewardError for an unknown reward."""
    from wfm_reward import registry

    rewards = {
        # A worker without progress for reward.timeout_s can only produce timeouts.
        f.name: {
            "stall_s": min(registry.get_reward_class(f.name).stall_s, reward.timeout_s),
            **f.model_dump(include={"device", "workers", "max_batch", "options"}, exclude_none=True),
        }
        for f in reward.functions
    }
    return {"pipes": {"folder": str(sockets)}, "rewards": rewards}


def service_environment(reward: RewardRecipe, num_ranks: int) -> dict[str, str]:
    """Return the environment variables of the reward service. num_ranks: number of training ranks on this machine.

    Raises RecipeError if a GPU does not exist. Logs a warning if a GPU is also used for training.
    """
    on_gpu = {f.name: f.device for f in reward.functions if f.uses_gpu}
    if not on_gpu:
        return dict(os.environ)
    gpus = find_machine_gpus(num_ranks)
    names = {name: gpus.visible_name(device, f"device of reward {name}") for name, device in on_gpu.items()}
    if shared := [f"{on_gpu[name]} ({name})" for name, gpu in names.items() if gpu in gpus.training_gpus]:
        log.warning(
            "reward devices: %s also used for training: rewards and training share the memory and slow each other down",
            ", ".join(shared),
        )
    return run_gpu_environment(os.environ)
