import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from each_case import check_each
from wfm_ds.distributed import lifecycle
from wfm_ds.errors import UserError

WAIT_S = 30
LAUNCHER_KEYS = ("LOCAL_RANK", "RANK", "WFM_LAUNCH_PID", "WFM_STATUS_FILE")
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def start(code, **env):
    """Start a Python process with lifecycle imported, which runs `code` and prints `ready`."""
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCHER_KEYS} | env
    lines = f"import os, signal, subprocess, sys, threading\nfrom wfm_ds.distributed import lifecycle\n{code}"
    command = [sys.executable, "-c", lines]
    return subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out.decode(), err.decode()


SAY_READY = "sys.stdout.write('ready\\n'); sys.stdout.flush()\n"


def wait_ready(process):
    assert process.stdout.readline() == b"ready\n"


def test_signals_only_raise_one_flag_that_keeps_the_first_name():
    code = "flag = lifecycle.install_signal_handlers()\nassert not flag.is_set and flag.stop_signal is None\n"
    code += SAY_READY + "sys.stdin.readline()\nassert lifecycle.install_signal_handlers() is flag\n"
    code += SAY_READY + "sys.stdin.readline()\nsys.stdout.write(f'{flag.is_set} {flag.stop_signal.name}')"
    process = start(code)
    for number in (signal.SIGTERM, signal.SIGINT):
        wait_ready(process)
        process.send_signal(number)
        process.send_signal(number)
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert finish(process) == (0, "True SIGTERM", "")


def test_a_killed_launcher_ends_the_rank_even_while_it_is_a_zombie():
    launcher = start(SAY_READY + "sys.stdin.readline()")
    wait_ready(launcher)
    rank = start(
        "lifecycle.watch_parent(interval_s=0.05)\n" + SAY_READY + "threading.Event().wait(60)",
        WFM_LAUNCH_PID=str(launcher.pid),
    )
    wait_ready(rank)
    launcher.kill()  # it remains a zombie until the rank has ended
    code, _, err = finish(rank)
    finish(launcher)
    assert code == lifecycle.ORPHAN_EXIT_CODE
    assert err == f"process {rank.pid} exits: its launcher has died\n"


def test_a_rank_ends_when_its_parent_is_gone():
    child = "from wfm_ds.distributed import lifecycle; import threading; lifecycle.watch_parent(0.05); "
    child += "print('ready', flush=True); threading.Event().wait(60)"
    parent = start(f"subprocess.run([sys.executable, '-c', {child!r}])", **ONE_RANK)
    wait_ready(parent)
    parent.kill()
    code, _, err = finish(parent)  # its stderr stays open until the child has ended
    assert code == -signal.SIGKILL
    assert err.endswith("exits: its launcher has died\n")


def test_the_parent_watch_can_be_stopped_and_ignores_shells(monkeypatch):
    for key in LAUNCHER_KEYS:
        monkeypatch.delenv(key, raising=False)
    assert lifecycle.watch_parent() is None
    for key, value in ONE_RANK.items():
        monkeypatch.setenv(key, value)
    stopping = lifecycle.watch_parent()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "parent-watch"]
    stopping.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_the_status_file_is_written_only_for_the_launcher(tmp_path, monkeypatch):
    monkeypatch.delenv("WFM_STATUS_FILE", raising=False)
    lifecycle.write_status("finished", 3)
    monkeypatch.setenv("WFM_STATUS_FILE", str(tmp_path / "status.json"))
    lifecycle.write_status("preempted", 7)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert json.loads((tmp_path / "status.json").read_text()) == {"status": "preempted", "step": 7}


def test_only_rank_0_prints_a_user_error():
    exit_line = "lifecycle.exit_with_user_error('no such file', prints={})"
    first, second = start(exit_line.format(True)), start(SAY_READY + exit_line.format(False))
    wait_ready(second)
    assert finish(first) == (2, "", "error: no such file\n")
    assert second.poll() is None  # it waits for the launcher
    # Before the handler is installed, a signal ends the process too: without a message, with the signal's exit code.
    second.terminate()
    code, out, err = finish(second)
    assert (out, err) == ("", "")
    assert code in (2, -signal.SIGTERM)


def test_the_first_rank_of_each_node_prints_an_error_before_the_ranks_meet():
    """Only the second node may lack a file."""
    ranks = {(0, 0): "error: x\n", (1, 1): "", (2, 0): "error: x\n", (3, 1): ""}
    for (rank, local_rank), printed in ranks.items():
        variables = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2, "MASTER_ADDR": "a"}
        code = f"os.environ.update({ {name: str(value) for name, value in variables.items()} })\n"
        assert finish(start(code + "lifecycle.EXIT_WAIT_S = 0\nlifecycle.fail_rank('x')")) == (2, "", printed)


@pytest.mark.parametrize("past", [True, False])
def test_other_ranks_end_with_the_launchers_signal_or_at_the_deadline(past):
    code = "lifecycle.EXIT_WAIT_S = 0.2\nlifecycle.install_signal_handlers()\n"
    if past:
        code = "lifecycle.install_signal_handlers()\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert finish(start(code + "lifecycle.exit_with_user_error('x', prints=False)")) == (2, "", "")


def test_a_signal_handled_by_another_thread_ends_the_wait():
    code = "lifecycle.install_signal_handlers()\n"
    # The main thread blocks the signal, so the kernel delivers it to another thread, as can happen with torch's
    # threads.
    code += "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    code += "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    code += SAY_READY + "lifecycle.EXIT_WAIT_S = 600\nlifecycle.exit_with_user_error('x', prints=False)"
    process = start(code)
    wait_ready(process)
    process.terminate()
    assert finish(process) == (2, "", "")


def test_a_rank_receives_the_signals_that_its_launcher_blocked():
    code = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\nos.kill(os.getpid(), signal.SIGTERM)\n"
    process = start(code + "sys.stdout.write(str(lifecycle.install_signal_handlers().is_set))")
    assert finish(process) == (0, "True", "")


def test_the_exit_code_of_a_preempted_run():
    assert lifecycle.read_preempted_code({}) == 0
    assert lifecycle.read_preempted_code({"WFM_PREEMPTED_CODE": "75"}) == 75
    for wrong in ("256", "-1", "stop", ""):
        with pytest.raises(UserError, match=f"^WFM_PREEMPTED_CODE must be an exit code from 0 to 255, got '{wrong}'$"):
            lifecycle.read_preempted_code({"WFM_PREEMPTED_CODE": wrong})


@check_each(
    ("given", "kept"),
    [
        (["--local_rank=1", "r.yaml", "a.b=1"], ["r.yaml", "a.b=1"]),
        (["--local_rank", "1", "r.yaml"], ["r.yaml"]),
        (["--local-rank=0", "--check", "r.yaml"], ["--check", "r.yaml"]),
        (["r.yaml", "run.output_dir=--local_rank"], ["r.yaml", "run.output_dir=--local_rank"]),
    ],
)
def test_the_launchers_argument_is_dropped(given, kept):
    assert lifecycle.strip_launcher_args(given) == kept
