"""The `deepspeed` command: DeepSpeed's own runner plus `-m`, a graceful stop, and an exit code that tells the truth.

    deepspeed --num_gpus 8 -m wfm_ds.train recipes/mine.yaml

Everything that the stock runner understands is passed on unchanged, but for --num_gpus beside CUDA_VISIBLE_DEVICES,
which would undo it; it runs as a child in a process group of its own.
`python -m wfm_ds.launch ...` is the same program. What the ranks do with the environment set here is in lifecycle.py.

The stock runner forgets ranks when it is signalled and reports success when its inner launcher is killed. Therefore:
a signal goes to the ranks first, so that they can save; the whole group is killed at the end, so that nothing is
orphaned; and a module of wfm_ds that leaves no final status has failed, whatever the runner says.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import wfm_ds
from wfm_ds.distributed.accelerator import accelerator_present
from wfm_ds.distributed.gpus import ALL, NOTE, VISIBLE, names, noted
from wfm_ds.distributed.runner_line import VERSION, scan
from wfm_ds.distributed.world import free_port
from wfm_ds.errors import UserError
from wfm_ds.program import exit_code

DEFAULT_HOSTFILE = Path("/job/hostfile")  # the runner reads it unasked, and the launch becomes one of several nodes
FINAL_STATUS = ("finished", "preempted")
GRACE_S = 600.0  # for a checkpoint of a large model; WFM_GRACE_S changes it
TERM_S = 35.0  # the inner launcher gives each rank 30 s before it kills it
REPEAT_S = 2.0  # signals closer than this count as one: terminals and schedulers like to send several
REAP_S = 30.0


def rewrite(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """The line with `-m` replaced by `--module`, and the index of the script or module name, None if there is none.

    Only the runner's own part is touched: what follows the name belongs to the user's program.
    """
    out = list(argv)
    given, name_at = scan(argv)
    at, _ = given.get("--module", (0, ""))
    if out and out[at] == "-m":
        out[at] = "--module"
    return out, name_at


@dataclass(frozen=True, slots=True)
class Launch:
    """A job to start, and how to judge its end."""

    argv: tuple[str, ...]  # for the runner
    env: Mapping[str, str]  # changes to the environment
    is_local: bool  # the ranks of this line are descendants of the runner
    must_report: bool  # exit code 0 counts only with a final status


def plan(argv: Sequence[str], environ: Mapping[str, str], *, has_accelerator: bool, has_hostfile: bool) -> Launch:
    """Decide from the line, the environment and two facts about the machine; touches nothing but a port."""
    out, name_at = rewrite(argv)
    given, _ = scan(argv)
    env: dict[str, str] = {}
    if not has_accelerator and "DS_ACCELERATOR" not in environ:
        env["DS_ACCELERATOR"] = "cpu"
    is_single = not has_hostfile and not given.keys() & {"--hostfile", "--node_rank", "--force_multi"}
    if has_accelerator and environ.get("DS_ACCELERATOR") != "cpu":
        out, of_gpus = with_users_gpus(out, environ) if is_single else (out, {NOTE: ALL})
        env |= of_gpus
        given, name_at = scan(out)
    if is_single and name_at is not None and "--master_port" not in given:
        # The runner's port is the same for all jobs. Several nodes must agree on one, so there it stays.
        out = ["--master_port", str(free_port()), *out]
    is_local = is_single or "--no_ssh" in given
    is_first_node = given.get("--node_rank", (0, "0"))[1] == "0"
    is_ours = "--module" in given and name_at is not None and argv[name_at].startswith("wfm_ds.")
    return Launch(tuple(out), env, is_local, must_report=is_ours and is_local and is_first_node)


def with_users_gpus(argv: list[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The line and the changes to the environment for one node, so that CUDA_VISIBLE_DEVICES holds beside --num_gpus.

    The runner would ignore it there and take the machine's first GPUs, which may be somebody else's. Where the line
    itself names GPUs (--include, --exclude) or nodes, it counts all of the machine's. Raises UserError for too few, and
    for names that the runner cannot read.
    """
    visible, (given, _) = environ.get(VISIBLE, ""), scan(argv)
    if not visible or given.keys() & {"--include", "--exclude", "--num_nodes"}:
        return argv, {NOTE: ALL if visible else noted(environ)}
    there = names(visible)
    if not all(name.isdecimal() for name in there):
        raise UserError(
            f"{VISIBLE}={visible}: DeepSpeed's launcher takes numbers only: give those of nvidia-smi -L, unset it to "
            "use all GPUs of this machine, or start by torchrun or python -m"
        )
    if "--num_gpus" not in given:
        return argv, {NOTE: visible}  # the runner heeds it
    at, number = given["--num_gpus"]
    wanted = int(number) if number.isdecimal() else 0
    if wanted == 0:  # for the runner to judge
        return argv, {NOTE: visible}
    if wanted > len(there):
        raise UserError(f"--num_gpus {wanted}: {VISIBLE}={visible} has {len(there)} of them")
    width = 1 if "=" in argv[at] else 2
    return argv[:at] + argv[at + width :], {NOTE: visible, VISIBLE: ",".join(there[:wanted])}


def asked_for_help(argv: Sequence[str]) -> list[str] | None:
    """A module of ours and its words if they only ask for --help or --version: no job, so no ranks that repeat it."""
    given, name_at = scan(argv)
    if "--module" not in given or name_at is None or not argv[name_at].startswith("wfm_ds."):
        return None
    shortest = len("--h")
    asked = any(
        word == "-h" or (len(word) >= shortest and any(name.startswith(word) for name in ("--help", "--version")))
        for word in argv[name_at + 1 :]
    )
    return list(argv[name_at:]) if asked else None


def say(text: str) -> None:
    sys.stderr.write(f"deepspeed (wfm_ds): {text}\n")
    sys.stderr.flush()


class Supervisor:
    """One runner in its own process group, from its start to the end of the last of its descendants.

    After a signal: the ranks get it (`told`), after `grace_s` the group gets SIGTERM (`ending`), `TERM_S` later SIGKILL
    (`killed`). A further signal, at least `REPEAT_S` after the last, skips the wait that is under way.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, grace_s: float, is_local: bool) -> None:
        self.grace_s, self.is_local = grace_s, is_local
        self.stage, self.next_at_s, self.heard_at_s = "running", float("inf"), float("-inf")
        # Waited for with sigtimedwait, so blocked: no handler can interrupt a decision. What the caller ignores
        # (nohup, background jobs) stays ignored.
        forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        self.signals = {s for s in forwarded if signal.getsignal(s) is not signal.SIG_IGN} | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, lambda *_: None)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)

        def unblock() -> None:  # a signal mask is inherited
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

        self.child = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=unblock,
        )

    def run(self) -> int:
        """Wait for the runner and return its exit code (128 + n if signal n ended it)."""
        try:
            while not self.has_ended() and self.stage != "lost":
                now_s = time.monotonic()
                if now_s >= self.next_at_s:
                    self.escalate(now_s)
                # The second is for a SIGCHLD that another child has swallowed.
                event = signal.sigtimedwait(self.signals, min(1.0, max(0.0, self.next_at_s - now_s)))
                if event is not None and event.si_signo == signal.SIGUSR1:
                    self.ask_for_save()
                elif event is not None and event.si_signo != signal.SIGCHLD:
                    self.heard(signal.Signals(event.si_signo), time.monotonic())
        finally:
            self.signal_group(signal.SIGKILL)  # before the runner is reaped, so that its id cannot be another's
        try:
            code = self.child.wait(REAP_S)
        except subprocess.TimeoutExpired:
            say(f"process {self.child.pid} does not end after SIGKILL; giving up on it")
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    def has_ended(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # NOWAIT: look, do not reap
        return os.waitid(os.P_PID, self.child.pid, options) is not None

    def ask_for_save(self) -> None:
        """SIGUSR1 is for the ranks: a checkpoint after the step that is under way."""
        for pid in self.rank_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def heard(self, number: signal.Signals, now_s: float) -> None:
        """A stop signal came: tell the ranks, or skip the wait if they were told."""
        if now_s - self.heard_at_s < REPEAT_S:
            return
        self.heard_at_s = now_s
        ranks = self.rank_pids() if self.stage == "running" else []
        if not ranks:
            self.escalate(now_s)
            return
        say(f"{number.name}: {len(ranks)} ranks have {self.grace_s:.0f} s to save; another signal skips the wait")
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                # Ranks stop at a step boundary on these two; a hang-up would kill them.
                os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self.stage, self.next_at_s = "told", now_s + self.grace_s

    def escalate(self, now_s: float) -> None:
        """Go to the next stage of ending the group."""
        if self.stage in ("running", "told"):
            say("sending SIGTERM to all processes of the job")
            self.signal_group(signal.SIGTERM)
            self.stage, self.next_at_s = "ending", now_s + TERM_S
        elif self.stage == "ending":
            say("sending SIGKILL to all processes of the job")
            self.signal_group(signal.SIGKILL)
            self.stage, self.next_at_s = "killed", now_s + REAP_S
        else:
            self.stage = "lost"

    def rank_pids(self) -> list[int]:
        """The children of DeepSpeed's inner launcher, which is a child of the runner; none for a remote job."""
        if not self.is_local:
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


def reported(path: Path) -> bool:
    """Return whether rank 0 left a final status: its very last act, so all before it is done."""
    try:
        status = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and status.get("status") in FINAL_STATUS


def grace_from(environ: Mapping[str, str]) -> float:
    """WFM_GRACE_S in seconds, or its default if unset. Raises UserError if it is not a number >= 0."""
    given = environ.get("WFM_GRACE_S", str(GRACE_S))
    try:
        grace_s = float(given)
    except ValueError:
        grace_s = math.nan
    if not grace_s >= 0:
        raise UserError(f"WFM_GRACE_S must be a number of seconds, got {given!r}")
    return grace_s


def launch(job: Launch, grace_s: float) -> int:
    """Run the job to its end and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="wfm_launch_"))
    env = {k: v for k, v in os.environ.items() if k not in ("WFM_STATUS_FILE", "WFM_LAUNCH_PID")} | dict(job.env)
    if job.is_local:  # elsewhere neither the path nor the process id means anything
        env |= {"WFM_STATUS_FILE": str(folder / "status.json"), "WFM_LAUNCH_PID": str(os.getpid())}
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *job.argv]
    try:
        code = Supervisor(command, env, grace_s=grace_s, is_local=job.is_local).run()
        if code == 0 and job.must_report and not reported(folder / "status.json"):
            say("the job ended without a final status: its ranks were killed or stopped early; see the output above")
            return 1
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: run(words))


def run(argv: Sequence[str]) -> int:
    """Start what the line names; its options are the runner's, so nothing is parsed here but what must be known."""
    if list(argv[:1]) == [VERSION]:
        sys.stdout.write(f"wfm_ds {wfm_ds.__version__}\n")
        return 0
    grace_s = grace_from(os.environ)
    has_hostfile = DEFAULT_HOSTFILE.is_file()
    if has_hostfile and "--hostfile" not in scan(argv)[0]:
        lines = [line.split()[0] for line in DEFAULT_HOSTFILE.read_text().splitlines() if line.split()]
        hosts = [name for name in lines if not name.startswith("#")]
        say(f"{DEFAULT_HOSTFILE} exists, so this is a launch on its nodes: {', '.join(hosts)}")
    if (module := asked_for_help(argv)) is not None:
        return subprocess.run([sys.executable, "-m", *module]).returncode
    job = plan(argv, os.environ, has_accelerator=accelerator_present(), has_hostfile=has_hostfile)
    return launch(job, grace_s)


if __name__ == "__main__":
    sys.exit(main())
