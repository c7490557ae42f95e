"""The `deepspeed` command: DeepSpeed's runner with the option `-m`, a graceful stop, and reliable exit codes.

    deepspeed --num_gpus 8 -m wfm_ds.train recipes/mine.yaml

`python -m wfm_ds.launch ...` does the same. Stop signals are sent to the ranks first, so that they can save a
checkpoint, and the whole process group is killed at the end. If a wfm_ds module ends without a final status, the run
counts as failed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import wfm_ds
from wfm_ds.distributed.accelerator import find_free_port, is_accelerator_present
from wfm_ds.distributed.gpus import ALL_GPUS, LAUNCH_GPUS, VISIBLE_DEVICES, launch_gpus_value, split_visible_devices
from wfm_ds.distributed.hook import VERSION_OPTION, parse_runner_options
from wfm_ds.distributed.ranks import remove_rank_variables
from wfm_ds.errors import UserError
from wfm_ds.program import USER_ERROR_CODE, run_with_exit_code
from wfm_ds.transport.socket_folders import SocketFolder

RUNNER_MODULE, RANK_MODULE = "deepspeed.launcher.runner", "wfm_ds.train"
DEFAULT_HOSTFILE = Path("/job/hostfile")  # if it exists, DeepSpeed's runner uses its nodes by default
FINAL_STATUSES = ("finished", "preempted")
GRACE_S = 600.0  # long enough to save a large model; WFM_GRACE_S overrides it
TERM_WAIT_S = 35.0  # the inner launcher kills its ranks after 30 s
SHIELDED_WAIT_S = 3.0  # the inner launcher ends at most 1 s after its ranks
SIGNAL_REPEAT_S = 2.0  # signals closer together count as one, because terminals and schedulers may send several
REAP_TIMEOUT_S = 30.0


def normalize_arguments(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """Replace the runner's option `-m` by `--module`. Arguments after the script or module name are not changed.

    Returns (arguments, index of the script or module name). The index is None if there is no such name.
    """
    arguments = list(argv)
    options, name_at = parse_runner_options(argv)
    index, _ = options.get("--module", (0, ""))
    if arguments and arguments[index] == "-m":
        arguments[index] = "--module"
    return arguments, name_at


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """Arguments and environment for DeepSpeed's runner, and properties of the job that affect its supervision."""

    argv: tuple[str, ...]  # arguments of DeepSpeed's runner
    env: Mapping[str, str]  # changes to the environment
    is_local: bool  # the ranks are descendants of the runner
    must_report_status: bool  # exit code 0 without a final status is a failure
    shields_runner: bool = False  # DeepSpeed's processes do not receive SIGTERM and SIGUSR1, only the ranks do
    is_single_rank: bool = False  # argv is for wfm_ds.train, which then runs without DeepSpeed's runner


def plan_launch(
    argv: Sequence[str], environ: Mapping[str, str], *, has_accelerator: bool, has_hostfile: bool
) -> LaunchJob:
    """Return the job for these arguments and environment. Its only side effect is to probe for a free port.

    Raises UserError if --num_gpus and CUDA_VISIBLE_DEVICES contradict each other.
    """
    arguments, name_at = normalize_arguments(argv)
    options, _ = parse_runner_options(argv)
    env: dict[str, str] = {}
    if not has_accelerator and "DS_ACCELERATOR" not in environ:
        env |= cpu_environment(environ)
    is_single_node = not has_hostfile and not options.keys() & {"--hostfile", "--node_rank", "--force_multi"}
    if has_accelerator and environ.get("DS_ACCELERATOR") != "cpu":
        arguments, gpu_env = (
            apply_visible_devices(arguments, environ) if is_single_node else (arguments, {LAUNCH_GPUS: ALL_GPUS})
        )
        env |= gpu_env
        options, name_at = parse_runner_options(arguments)
    module = arguments[name_at] if "--module" in options and name_at is not None else ""
    if is_single_node and name_at is not None and "--master_port" not in options:
        # The runner's default port is the same for all jobs. Several nodes keep it, because they must use one port.
        arguments = ["--master_port", str(find_free_port()), *arguments]
    is_local = is_single_node or "--no_ssh" in options
    is_first_node = options.get("--node_rank", (0, "0"))[1] == "0"
    return LaunchJob(
        tuple(arguments),
        env,
        is_local,
        must_report_status=module.startswith("wfm_ds.") and is_local and is_first_node,
        shields_runner=module == RANK_MODULE and is_local,
    )


def apply_visible_devices(argv: list[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Make --num_gpus N use the first N GPUs of CUDA_VISIBLE_DEVICES. Returns (arguments, environment changes).

    With --num_gpus alone, DeepSpeed's runner ignores CUDA_VISIBLE_DEVICES. Nothing is changed with --include, --exclude
    or --num_nodes, which refer to all GPUs of the machine. Raises UserError if there are too few GPUs, or if
    CUDA_VISIBLE_DEVICES contains anything but numbers.
    """
    visible, (options, _) = environ.get(VISIBLE_DEVICES, ""), parse_runner_options(argv)
    if not visible or options.keys() & {"--include", "--exclude", "--num_nodes"}:
        return argv, {LAUNCH_GPUS: ALL_GPUS if visible else launch_gpus_value(environ)}
    gpus = split_visible_devices(visible)
    if not all(name.isdecimal() for name in gpus):
        raise UserError(
            f"{VISIBLE_DEVICES}={visible}: DeepSpeed's launcher supports only numbers; use those of nvidia-smi "
            "-L, unset it to "
            "use all GPUs, or start with torchrun or python -m"
        )
    if "--num_gpus" not in options:
        return argv, {LAUNCH_GPUS: visible}  # the runner then respects CUDA_VISIBLE_DEVICES
    index, number = options["--num_gpus"]
    num_gpus = int(number) if number.isdecimal() else 0
    if num_gpus == 0:  # the runner reports this error
        return argv, {LAUNCH_GPUS: visible}
    if num_gpus > len(gpus):
        raise UserError(f"--num_gpus {num_gpus}: {VISIBLE_DEVICES}={visible} has only {len(gpus)} GPUs")
    num_arguments = 1 if "=" in argv[index] else 2
    return argv[:index] + argv[index + num_arguments :], {
        LAUNCH_GPUS: visible,
        VISIBLE_DEVICES: ",".join(gpus[:num_gpus]),
    }


def find_help_request(argv: Sequence[str]) -> list[str] | None:
    """Return [module, arguments...] if a wfm_ds module is called with --help or --version, else None."""
    options, name_at = parse_runner_options(argv)
    if "--module" not in options or name_at is None or not argv[name_at].startswith("wfm_ds."):
        return None
    shortest = len("--h")
    is_help = any(
        option == "-h" or (len(option) >= shortest and any(name.startswith(option) for name in ("--help", "--version")))
        for option in argv[name_at + 1 :]
    )
    return list(argv[name_at:]) if is_help else None


def print_message(text: str) -> None:
    sys.stderr.write(f"deepspeed (wfm_ds): {text}\n")
    sys.stderr.flush()


class Supervisor:
    """Runs DeepSpeed's runner in a new process group and passes signals on to the ranks.

    A stop signal is first passed to the ranks (stage `signaled`). After `grace_s` seconds, the process group receives
    SIGTERM (`ending`), and after another TERM_WAIT_S seconds SIGKILL (`killed`). A shielded runner ignores SIGTERM, so
    without ranks it receives SIGKILL after SHIELDED_WAIT_S seconds instead. A second stop signal skips the current
    wait.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], job: LaunchJob, grace_s: float) -> None:
        self.job, self.grace_s = job, grace_s
        self.stage, self.next_at_s, self.last_signal_s = "running", float("inf"), float("-inf")
        # Blocked because `run` receives signals by sigtimedwait, without handlers. Signals that the caller ignores
        # (nohup, background jobs) stay ignored.
        forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        self.signals = {s for s in forwarded if signal.getsignal(s) is not signal.SIG_IGN} | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, lambda *_: None)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)

        # SLURM sends signals to all processes of a job. SIGTERM would end DeepSpeed's processes, which would kill the
        # ranks before they have saved. Ranks unblock the signals (lifecycle.py).
        shielded = {signal.SIGTERM, signal.SIGUSR1} if job.shields_runner else set()

        def restore_mask() -> None:  # children inherit the signal mask
            signal.pthread_sigmask(signal.SIG_SETMASK, {*old_mask, *shielded})

        self.child = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=restore_mask
        )

    def run(self) -> int:
        """Wait for the runner and handle signals. Returns the runner's exit code, or 128 + n if signal n killed it."""
        try:
            while not self.has_ended() and self.stage != "lost":
                now_s = time.monotonic()
                if now_s >= self.next_at_s:
                    self.escalate_stop(now_s)
                # At most 1 s: the SIGCHLD of the runner may be merged with one of another child.
                event = signal.sigtimedwait(self.signals, min(1.0, max(0.0, self.next_at_s - now_s)))
                if event is not None and event.si_signo == signal.SIGUSR1:
                    self.request_save()
                elif event is not None and event.si_signo != signal.SIGCHLD:
                    self.handle_stop_signal(signal.Signals(event.si_signo), time.monotonic())
        finally:
            self.signal_group(signal.SIGKILL)  # before the runner is reaped, so that its id is not reused
        try:
            code = self.child.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print_message(f"process {self.child.pid} still runs after SIGKILL; no longer waiting for it")
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    def has_ended(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # NOWAIT: do not reap
        return os.waitid(os.P_PID, self.child.pid, options) is not None

    def request_save(self) -> None:
        """Send SIGUSR1 to the ranks, which then save a checkpoint after the current step."""
        for pid in self.rank_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def handle_stop_signal(self, number: signal.Signals, now_s: float) -> None:
        """Pass a stop signal on to the ranks. If they have already received a stop signal, skip the current wait."""
        if now_s - self.last_signal_s < SIGNAL_REPEAT_S:
            return
        self.last_signal_s = now_s
        ranks = self.rank_pids() if self.stage == "running" else []
        if not ranks:
            self.escalate_stop(now_s)
            return
        print_message(f"{number.name}: the ranks have {self.grace_s:.0f} s to save; another signal skips the wait")
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                # SIGTERM and SIGINT stop ranks at a step boundary; SIGHUP would kill them.
                os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self.stage, self.next_at_s = "signaled", now_s + self.grace_s

    def escalate_stop(self, now_s: float) -> None:
        if self.stage in ("running", "signaled"):
            print_message("sending SIGTERM to all processes of the job")
            self.signal_group(signal.SIGTERM)
            wait_s = SHIELDED_WAIT_S if self.job.shields_runner and self.stage == "running" else TERM_WAIT_S
            self.stage, self.next_at_s = "ending", now_s + wait_s
        elif self.stage == "ending":
            print_message("sending SIGKILL to all processes of the job")
            self.signal_group(signal.SIGKILL)
            self.stage, self.next_at_s = "killed", now_s + REAP_TIMEOUT_S
        else:
            self.stage = "lost"

    def rank_pids(self) -> list[int]:
        """Return the process ids of local ranks (children of DeepSpeed's inner launcher), or [] for a remote job."""
        if self.job.is_single_rank:
            return [self.child.pid]
        if not self.job.is_local:
            return []
        import psutil

        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.child.pid).children():
                if "deepspeed.launcher.launch" in process.cmdline()[:4]:  # python -u -m deepspeed.launcher.launch
                    return [rank.pid for rank in process.children()]
        return []

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


def has_final_status(path: Path) -> bool:
    """Return True if rank 0 wrote its final status, which it does just before it exits."""
    try:
        status = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and status.get("status") in FINAL_STATUSES


def read_grace_s(environ: Mapping[str, str]) -> float:
    """Return WFM_GRACE_S in seconds, or the default GRACE_S if it is unset.

    Raises UserError if it is not a number >= 0.
    """
    text = environ.get("WFM_GRACE_S", str(GRACE_S))
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = math.nan
    if not grace_s >= 0:
        raise UserError(f"WFM_GRACE_S must be a number of seconds >= 0, got {text!r}")
    return grace_s


def job_environment(environ: Mapping[str, str], *, is_single_rank: bool) -> dict[str, str]:
    """Return `environ` without WFM_STATUS_FILE and WFM_LAUNCH_PID, which an outer wfm_ds.launch may have set.

    is_single_rank: also remove the variables that an outer launcher sets for its ranks.
    """
    if is_single_rank:
        return remove_rank_variables(environ)
    return {name: value for name, value in environ.items() if name not in ("WFM_STATUS_FILE", "WFM_LAUNCH_PID")}


def cpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return additional variables for ranks on a CPU. Waiting threads must not spin, because ranks share the cores."""
    return {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def run_job(job: LaunchJob, grace_s: float) -> int:
    from wfm_ds.distributed.lifecycle import read_preempted_code  # imports psutil, which takes time

    preempted_code = read_preempted_code(os.environ)
    env = job_environment(os.environ, is_single_rank=job.is_single_rank) | dict(job.env)
    command = [sys.executable, "-m", RANK_MODULE if job.is_single_rank else RUNNER_MODULE, *job.argv]
    # Not in XDG_RUNTIME_DIR, which is removed at logout. If this process is killed, a later process removes the folder.
    with SocketFolder(Path(tempfile.gettempdir())) as folder:
        if job.is_local:  # the path and process id are not valid on other machines
            env |= {"WFM_STATUS_FILE": str(folder / "status.json"), "WFM_LAUNCH_PID": str(os.getpid())}
        code = Supervisor(command, env, job, grace_s).run()
        if code == 0 and job.must_report_status and not has_final_status(folder / "status.json"):
            print_message(
                "the job ended without a final status: its ranks were killed or exited early; see the output above"
            )
            return 1
        if code > USER_ERROR_CODE and code != preempted_code:  # after 1 or 2, the reason is printed already
            # 255 does not imply SIGHUP: sys.exit(-1) and a failed ssh have this code too.
            names = {base: s.name for s in signal.Signals for base in (128 + s, 256 - s) if base != 255}
            by_signal = f" (signal {names[code]})" if code in names else ""
            print_message(f"a process of the job ended with exit code {code}{by_signal}")
        return code


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return run_with_exit_code(lambda: run_launcher(arguments))


def run_launcher(argv: Sequence[str]) -> int:
    if list(argv[:1]) == [VERSION_OPTION]:
        sys.stdout.write(f"wfm_ds {wfm_ds.__version__}\n")
        return 0
    grace_s = read_grace_s(os.environ)
    has_hostfile = DEFAULT_HOSTFILE.is_file()
    if has_hostfile and "--hostfile" not in parse_runner_options(argv)[0]:
        lines = [line.split()[0] for line in DEFAULT_HOSTFILE.read_text().splitlines() if line.split()]
        hosts = [name for name in lines if not name.startswith("#")]
        print_message(f"{DEFAULT_HOSTFILE} exists: launching on its nodes {', '.join(hosts)}")
    if (module := find_help_request(argv)) is not None:
        return subprocess.run([sys.executable, "-m", *module]).returncode
    job = plan_launch(argv, os.environ, has_accelerator=is_accelerator_present(), has_hostfile=has_hostfile)
    return run_job(job, grace_s)


def run_single_rank(argv: Sequence[str]) -> int:
    """Train with one process on the CPU and return its exit code. argv: arguments of wfm_ds.train."""
    # DeepSpeed's runner and inner launcher are not used, because each would import torch and delay the start.
    env = cpu_environment(os.environ)
    job = LaunchJob(tuple(argv), env, is_local=True, must_report_status=True, is_single_rank=True)
    return run_job(job, read_grace_s(os.environ))


if __name__ == "__main__":
    sys.exit(main())
