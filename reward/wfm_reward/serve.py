"""`wfm serve CONFIG.yaml [--check]`: the reward service.

When all workers are ready, it writes pipes.json and prints one line of JSON to stdout. On SIGTERM or SIGINT, it
finishes running tasks and exits. A second signal makes it exit immediately. With --stop-on-eof, it ignores these
signals and stops when stdin is closed. The exit status is 0 after a requested stop, 2 for user errors, and otherwise 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from wfm_ds.errors import RewardError, UserError
from wfm_ds.program import ignore_job_signals, run_command
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.keys import BrokerKeys, load_broker_keys
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import Mailbox, check_endpoint
from wfm_ds.transport.tasks import FinishedTask
from wfm_reward import registry
from wfm_reward.base import Reward
from wfm_reward.config import ServiceConfig, load_config, read_service_token
from wfm_reward.decoder import STALL_S as DECODE_STALL_S
from wfm_reward.decoder import VIDEO_FILES, VaeScale
from wfm_reward.stats import ServiceStats
from wfm_reward.worker_pool import WorkerPool, decoder_program, reward_program, worker_stall_s

if TYPE_CHECKING:
    from wfm_reward.web.server import HttpServer

log = logging.getLogger(__name__)

DRAIN_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm serve", description="Run a reward service for images and videos.")
    p.add_argument("config", type=Path, help="configuration file (YAML)")
    p.add_argument("--check", action="store_true", help="check the configuration and exit")
    p.add_argument("--stop-on-eof", action="store_true", help="stop when stdin is closed (the parent has exited)")
    return p


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve %(levelname)s %(message)s")
    config, base = load_config(args.config), args.config.absolute().parent
    rewards = check_service(config, base)
    if args.check:
        for reward in rewards:
            reward.check_reachable()
        _print_status({"config": str(args.config), "rewards": sorted(config.rewards)})
        return 0
    return RewardServer(config, base, args.stop_on_eof).run()


def check_service(config: ServiceConfig, base: Path) -> list[Reward]:
    """Check rewards, addresses, keys, token and decoders without starting anything.

    Returns the rewards, without loading their models. Raises UserError if a check fails.
    """
    rewards = [registry.check_reward(name, r.device, r.options, r.max_batch) for name, r in config.rewards.items()]
    pipes, keys = config.pipes, _load_keys(config, base)
    for address, name in ((pipes.clients, "clients"), (pipes.workers, "workers")):
        endpoint = _endpoint(address, pipes.folder or Path("/tmp"), name)
        check_endpoint(endpoint, keys=name == "clients" and keys is not None)
    if config.http is not None:
        read_service_token(config.http, base, os.environ)
    for channels, decoder in config.latent_decoders.items():
        VaeScale.from_vae_config(channels, decoder.vae)
    return rewards


class RewardServer:
    """A running reward service. Call `run` in the main thread of its process."""

    def __init__(self, config: ServiceConfig, base: Path, stop_on_eof: bool) -> None:
        """Create the broker, the worker pool and the HTTP server without starting them.

        base: folder of the configuration file. stop_on_eof: stop when stdin is closed. Raises PipeError if an address
        cannot be bound, and KeyFileError for invalid keys.
        """
        self.config = config
        self.pipes_file = base / config.pipes.file
        self.stop_on_eof = stop_on_eof
        self._selector = selectors.DefaultSelector()
        self._signals: Mailbox[int] = Mailbox()
        self._stalled_workers: Mailbox[str] = Mailbox()  # worker ids
        self._stop_reason: str | None = None
        self._drain_s = 0.0
        if (folder := config.pipes.folder) is None:
            self._socket_folder = SocketFolder()  # removed when this process exits
            folder = self._socket_folder.path
        self._folder = folder
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.pipes_file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RewardError(f"pipes: cannot create the folder {error.filename}: {error.strerror}") from error
        self._stats = ServiceStats()
        try:
            self._keys = _load_keys(config, base)
            self._broker = self._create_broker()
            self._remove_videos()  # left by a killed service; only one service uses the folder at a time
            programs = {name: reward_program(name, reward) for name, reward in config.rewards.items()}
            for channels, decoder in config.latent_decoders.items():
                programs[f"decode:{channels}"] = decoder_program(channels, decoder, self._folder)
            self._workers = WorkerPool(self._broker, programs, self._selector)
            self._http_server = self._create_http_server(base) if config.http is not None else None
        except UserError:
            self._remove_folder()
            raise

    def run(self) -> int:
        """Serve until a stop is requested, and return the exit status. Raises RewardError if a reward cannot start."""
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._stalled_workers, selectors.EVENT_READ, self._on_stalled)
        ignore_job_signals()
        for number in (signal.SIGCHLD,) if self.stop_on_eof else (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda received, _: self._signals.put(received))
        if self.stop_on_eof:
            self._selector.register(0, selectors.EVENT_READ, self._on_stdin)
        self._broker.start()
        try:
            if self._http_server is not None:
                self._http_server.start()
            while self._stop_reason is None:
                self._run_once()
            log.info("stopping: %s", self._stop_reason)
        finally:
            self._broker.stop(self._drain_s)
            if self._http_server is not None:
                self._http_server.stop()
            self._workers.stop()
            self._remove_files()
        return 0 if self._broker.error is None else 1

    def _run_once(self) -> None:
        was_ready = self._workers.has_been_ready
        self._workers.supervise(time.monotonic())
        if self._workers.has_been_ready and not was_ready:
            self._announce_ready()
        if not self._broker.is_alive():
            self._stop_reason = "the broker has failed"
        timeout_s = min(1.0, self._workers.next_action_s(time.monotonic()))
        for key, _ in self._selector.select(timeout_s):
            on_event: Callable[[], None] = key.data
            on_event()

    def _create_broker(self) -> Broker:
        pipes = self.config.pipes
        kinds = {}
        for name, reward in self.config.rewards.items():
            reward_class = registry.get_reward_class(name)
            properties = {
                "max_batch": registry.resolve_max_batch(name, reward.max_batch),
                "options": reward.options,
                "needs_reference": reward_class.needs_reference,
                "needs_sound": reward_class.needs_sound,
                "sees_images": reward_class.sees_images,
            }
            kinds[f"score:{name}"] = TaskKind(worker_stall_s(name, reward), properties, reward.max_waiting)
        kinds |= {f"decode:{channels}": TaskKind(DECODE_STALL_S, {}) for channels in self.config.latent_decoders}
        return Broker(
            clients=_endpoint(pipes.clients, self._folder, "clients"),
            workers=_endpoint(pipes.workers, self._folder, "workers"),
            kinds=kinds,
            max_waiting=pipes.max_waiting,
            max_bytes=pipes.spool_mib * 2**20,
            observer=self._record_task,
            keys=self._keys,
            on_stall=self._stalled_workers.put,
        )

    def _record_task(self, ended: FinishedTask) -> None:
        self._stats.record_task(ended)
        self._workers.record_task(ended)

    def _create_http_server(self, base: Path) -> HttpServer:
        try:
            from wfm_reward.web.server import HttpServer
        except ImportError as error:
            raise RewardError(f"HTTP needs a package ({error}): pip install 'wfm_ds[reward-http]'") from error
        return HttpServer(
            self.config, base, broker=self._broker, workers=self._workers, stats=self._stats, keys=self._keys
        )

    def _announce_ready(self) -> None:
        rewards = sorted(self.config.rewards)
        http = {} if self._http_server is None else {"http": self._http_server.url}
        content = {"clients": self._broker.client_endpoint, "pid": os.getpid(), "rewards": rewards, **http}
        temporary = self.pipes_file.with_name(f"{self.pipes_file.name}.{os.getpid()}.tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            json.dump(content, out)
        temporary.replace(self.pipes_file)
        _print_status({"ready": rewards, "pipes": str(self.pipes_file), **http})

    def _on_signals(self) -> None:
        for number in self._signals.take_all():
            if number != signal.SIGCHLD and self._stop_reason is None:
                self._stop_reason, self._drain_s = signal.Signals(number).name, DRAIN_S
                # Nothing reads the mailbox while running tasks finish, so the next signal must act directly.
                for stop_signal in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(stop_signal, self._exit_immediately)

    def _on_stalled(self) -> None:
        for worker in self._stalled_workers.take_all():
            self._workers.watch_stalled_worker(worker, time.monotonic())

    def _on_stdin(self) -> None:
        if not os.read(0, 4096):
            self._stop_reason = "the parent has exited"  # nobody needs the results of running tasks

    def _exit_immediately(self, number: int, frame: FrameType | None) -> None:
        self._workers.kill()
        for name in ("clients", "clients.lock", "workers", "workers.lock"):
            (self._folder / name).unlink(missing_ok=True)
        self._remove_files()
        os._exit(0)

    def _remove_files(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self.pipes_file.read_text()).get("pid") == os.getpid():  # the file of this service
                self.pipes_file.unlink()
        self._remove_folder()

    def _remove_videos(self) -> None:
        for video in self._folder.glob(VIDEO_FILES):  # decoded but never collected
            video.unlink(missing_ok=True)

    def _remove_folder(self) -> None:
        self._remove_videos()
        with contextlib.suppress(OSError):  # not empty
            self._folder.rmdir()


def _load_keys(config: ServiceConfig, base: Path) -> BrokerKeys | None:
    return None if config.pipes.keys is None else load_broker_keys(base / config.pipes.keys.expanduser())


def _endpoint(address: str, folder: Path, name: str) -> str:
    return f"ipc://{folder.absolute()}/{name}" if address == "ipc" else address


def _print_status(status: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(status) + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise RewardError("cannot print the status: stdout is closed") from error


if __name__ == "__main__":
    sys.exit(main())
