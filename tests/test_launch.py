"""Tests of the launch command in isolation, then five real launches of DeepSpeed's runner (6 s each on free cores)."""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from each_case import check_each
from wfm_ds import __version__, launch
from wfm_ds.distributed import hook
from wfm_ds.errors import UserError
from wfm_ds.transport.socket_folders import remove_orphaned_folders

WAIT_S = 90
RUNNERS_PORT = "29500"
DRIVER = """
import dataclasses, os, sys
from wfm_ds import launch
job = launch.plan_launch(sys.argv[1:], os.environ, has_accelerator=False, has_hostfile=False)
sys.exit(launch.run_job(dataclasses.replace(job, must_report_status=True), grace_s=60))
"""
RANK = """
import json, os, sys, threading
from pathlib import Path
from wfm_ds.distributed import lifecycle

folder, mode = Path(sys.argv[2]), sys.argv[3]
rank = os.environ["RANK"]
flag = lifecycle.install_signal_handlers()
lifecycle.watch_parent(interval_s=0.2)
facts = {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv[1:], "env": dict(os.environ)}
(folder / f"part{rank}").write_text(json.dumps(facts))
(folder / f"part{rank}").rename(folder / f"rank{rank}.json")
never = threading.Event()
if mode == "exit9" and rank == "0":
    while not (folder / "rank1.json").exists():  # the launcher kills the other rank as soon as this one ends
        never.wait(0.05)
    sys.exit(9)
while not flag.is_set:
    if flag.take_save_request():
        (folder / f"asked{rank}").touch()
    never.wait(0.05)
if mode == "save":
    never.wait(3.0 if rank == "1" else 0.5)  # a slow save
    (folder / f"saved{rank}").write_text(flag.stop_signal.name)
    if rank == "0":
        lifecycle.write_status("preempted", 5)
"""


# ---- the command line


@pytest.fixture(scope="module")
def runner_parser():
    """Return the argument parser of DeepSpeed's runner."""
    from deepspeed.launcher import runner

    def parser_itself(parser, args=None):
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parser_itself)
        return runner.parse_args()


def test_a_single_rank_inherits_no_rank_of_an_outer_launcher():
    outer = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "7"}
    assert launch.job_environment(outer | kept, is_single_rank=True) == kept
    status = {"WFM_STATUS_FILE": "/tmp/s", "WFM_LAUNCH_PID": "3"}
    assert launch.job_environment(outer | kept | status, is_single_rank=False) == outer | kept


def test_switches_are_those_of_the_runner(runner_parser):
    valueless = {name for action in runner_parser._actions if action.nargs == 0 for name in action.option_strings}
    assert valueless == hook.SWITCHES


LINES = [
    "--num_gpus 2 -m wfm_ds.train r.yaml -m foo --module y",
    "--num_gpus=2 -m wfm_ds.train --local_rank 3",
    "-m --num_gpus 2 wfm_ds.train",
    "--module wfm_ds.train -m",
    "-H hosts --no_ssh --node_rank 1 --master_addr h -m wfm_ds.train r.yaml",
    "-Hhosts --no_ssh --node_r=0 -m wfm_ds.train",
    "--hostf hosts -q --force -m pkg.mod x",
    "-i localhost:0,1 --save_pid --launcher_args=-x train.py -m foo",
    "train.py --hostfile x -m foo",
]


@check_each("line", LINES)
def test_the_runner_finds_the_name_where_rewrite_finds_it(runner_parser, line):
    argv = line.split()
    out, at = launch.normalize_arguments(argv)
    parsed = argparse.ArgumentParser.parse_args(runner_parser, out)
    assert parsed.user_script == out[at]
    assert parsed.user_args == out[at + 1 :] == argv[at + 1 :]
    assert parsed.module == any(word in ("-m", "--module") for word in argv[:at])
    given, _ = launch.parse_runner_options(argv)
    assert given.get("--hostfile", (0, launch.DEFAULT_HOSTFILE.as_posix()))[1] == parsed.hostfile
    assert int(given.get("--node_rank", (0, "-1"))[1]) == parsed.node_rank


def test_a_line_without_a_name_stays_as_it_is():
    for words in ([], ["--help"], ["--num_gpus", "2"]):
        assert launch.normalize_arguments(words) == (words, None)


def plan(line, *, environ=(), has_accelerator=False, has_hostfile=False):
    return launch.plan_launch(line.split(), dict(environ), has_accelerator=has_accelerator, has_hostfile=has_hostfile)


def test_without_gpus_and_options_the_cpu_is_used():
    assert plan("a.py").env == {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}
    assert plan("a.py", environ={"OMP_WAIT_POLICY": "active"}).env["OMP_WAIT_POLICY"] == "active"
    assert "DS_ACCELERATOR" not in plan("a.py", has_accelerator=True).env
    assert plan("a.py", environ={"DS_ACCELERATOR": "cuda"}).env == {}
    environ = {"CUDA_VISIBLE_DEVICES": "2,3,4", "DS_ACCELERATOR": "cpu"}
    job = plan("--num_gpus 2 a.py", environ=environ, has_accelerator=True)
    assert (job.argv[2:], job.env) == (("--num_gpus", "2", "a.py"), {})


def on_gpus(line, visible=None, **facts):
    """Plan a launch on a machine with GPUs. Return the runner's arguments without the port, and changed variables."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    job = plan(line, environ=environ, has_accelerator=True, **facts)
    return " ".join(job.argv[2:] if job.argv[0] == "--master_port" else job.argv), job.env


@check_each(
    ("line", "visible", "note"),
    [
        ("--num_gpus 6 -m wfm_ds.train", None, "all"),
        ("-m wfm_ds.train", "2,3,4", "2,3,4"),
        ("--num_gpus 1 a.py", "", ""),
        ("--include localhost:0,1 a.py", "2,3,4", "all"),
        ("-i localhost:0,1 a.py", "2,3,4", "all"),
        ("--hostfile h --num_gpus 2 a.py", "2,3,4", "all"),
        ("--num_nodes 1 --num_gpus 2 a.py", "2,3,4", "all"),
    ],
)
def test_the_ranks_know_all_gpus_of_the_run(line, visible, note):
    said, env = on_gpus(line, visible)
    assert said == line.replace("-m ", "--module ")
    assert env == {"WFM_LAUNCH_GPUS": note}


@check_each("option", ["--num_gpus 2", "--num_gpus=2", "--num_accelerators 2", "--num_g 2"])
def test_a_number_of_gpus_selects_from_the_visible_ones(runner_parser, option):
    said, env = on_gpus(f"-q {option} --module wfm_ds.train --num_gpus 5", "2, 3,4")
    assert said == "-q --module wfm_ds.train --num_gpus 5"
    assert env == {"WFM_LAUNCH_GPUS": "2, 3,4", "CUDA_VISIBLE_DEVICES": "2,3"}
    job = plan(f"{option} -m wfm_ds.train r.yaml", environ={"CUDA_VISIBLE_DEVICES": "2,3,4"}, has_accelerator=True)
    assert (job.must_report_status, job.shields_runner) == (True, True)
    # Without a number, the runner uses CUDA_VISIBLE_DEVICES.
    assert argparse.ArgumentParser.parse_args(runner_parser, said.split()).num_gpus == -1


def test_unavailable_gpus_are_refused():
    with pytest.raises(UserError, match=r"--num_gpus 4: CUDA_VISIBLE_DEVICES=2,3,4 has only 3 GPUs"):
        on_gpus("--num_gpus 4 a.py", "2,3,4")
    for name in ("GPU-8f0a,GPU-77b1", "MIG-3a"):
        with pytest.raises(UserError, match=f"VISIBLE_DEVICES={name}: .* supports only numbers.* start with torchrun"):
            on_gpus("--num_gpus 1 a.py", name)


def test_only_a_single_node_gets_a_port_of_its_own():
    port = plan("--num_gpus 2 a.py").argv[:2]
    assert port[0] == "--master_port"
    assert port[1] != RUNNERS_PORT
    for line in ("--master_port 1234 a.py", "-H hosts a.py", "--node_rank=0 a.py", "--hostfile=h --no_ssh a.py"):
        assert plan(line).argv == tuple(line.split())
    assert plan("a.py", has_hostfile=True).argv == ("a.py",)


@check_each(
    ("line", "is_local", "must_report"),
    [
        ("-m wfm_ds.train r.yaml", True, True),
        ("--no_ssh --hostfile h --node_rank 0 -m wfm_ds.train", True, True),
        ("--no_ssh --hostfile h --node_rank 1 -m wfm_ds.train", True, False),
        ("--hostfile h -m wfm_ds.train", False, False),
        ("-m wfm_ds_other.train", True, False),
        ("wfm_ds.train", True, False),
        ("train.py -m wfm_ds.train", True, False),
        ("--help", True, False),
    ],
)
def test_which_jobs_must_report(line, is_local, must_report):
    job = plan(line)
    assert (job.is_local, job.must_report_status) == (is_local, must_report)


def test_device_nodes_are_found(tmp_path):
    (tmp_path / "null").touch()
    assert not launch.is_accelerator_present(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert launch.is_accelerator_present(tmp_path)


@check_each(
    ("text", "want"),
    [
        ('{"status": "finished", "step": 3}', True),
        ('{"status": "preempted", "step": 0}', True),
        ('{"status": "failed"}', False),
        ('{"status": ', False),
        ("[]", False),
        (None, False),
    ],
)
def test_only_a_final_status_counts(tmp_path, text, want):
    path = tmp_path / "status.json"
    if text is not None:
        path.write_text(text)
    assert launch.has_final_status(path) is want


# ---- the command


def run(*argv, **env):
    return subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_the_deepspeed_command_has_the_hook_of_wfm_ds():
    command = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert run(command, "--wfm-version").stdout == f"wfm_ds {__version__}\n"


def test_help_is_printed_without_starting_ranks():
    """`--help` does not start DeepSpeed's runner, which would start a rank per GPU and report a missing status."""
    words = ["--num_gpus", "2", "-m", "wfm_ds.train"]
    result = run(sys.executable, "-m", "wfm_ds.launch", *words, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("usage:") == 1
    assert launch.find_help_request([*words, "r.yaml", "--vers"]) == ["wfm_ds.train", "r.yaml", "--vers"]
    for others in ([*words, "r.yaml", "a.h=2"], ["-m", "foreign", "-h"], ["-h"], ["wfm_ds.train", "-h"], words):
        assert launch.find_help_request(others) is None


def test_the_command_imports_nothing_heavy():
    heavy = "{'torch', 'deepspeed', 'psutil', 'numpy.random', 'yaml', 'pydantic'} & set(sys.modules)"
    result = run(sys.executable, "-c", f"import sys, wfm_ds.launch; sys.stdout.write(str({heavy}))")
    assert result.stdout == "set()"


def test_an_invalid_grace_period_is_refused():
    result = run(sys.executable, "-m", "wfm_ds.launch", "a.py", WFM_GRACE_S="soon")
    assert result.returncode == 2
    assert "WFM_GRACE_S must be a number of seconds >= 0, got 'soon'" in result.stderr


# ---- the supervisor, with a small program instead of the runner


SUPERVISE = """
import os, sys
from wfm_ds import launch
launch.SHIELDED_WAIT_S = 0.2
job = launch.LaunchJob((), {}, is_local=True, must_report_status=False, shields_runner=sys.argv[2] == "True")
sys.exit(launch.Supervisor([sys.executable, "-c", sys.argv[1]], os.environ, job, grace_s=60).run())
"""


def supervised(code, *, shields=False, **kwargs):
    words = [sys.executable, "-c", SUPERVISE, code, str(shields)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **kwargs)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition, what):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {WAIT_S} s for {what}"
        time.sleep(0.05)


def test_the_exit_code_is_the_runners_and_all_descendants_end():
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    process = supervised(child + "print(p.pid, flush=True); sys.exit(7)")
    pid = int(process.stdout.readline())
    assert process.wait(WAIT_S) == 7
    eventually(lambda: not is_running(pid), "the orphan to end")


def test_a_runner_ended_by_a_signal_gives_128_plus_its_number():
    process = supervised("import os; os.kill(os.getpid(), 11)")
    assert process.wait(WAIT_S) == 128 + signal.SIGSEGV


def test_a_second_signal_kills_processes_that_ignore_the_first():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
    process = supervised(code + "time.sleep(600)", stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert "sending SIGTERM" in process.stderr.readline()  # it does not wait for ranks, because none has started
    process.send_signal(signal.SIGTERM)  # repeated immediately, so it counts as the same signal
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(launch.SIGNAL_REPEAT_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(launch.TERM_WAIT_S / 2) == 128 + signal.SIGKILL


def test_signals_that_the_caller_ignores_are_ignored():
    process = supervised(
        "import signal; print('ready', flush=True); signal.sigtimedwait({signal.SIGUSR1}, 2)",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # as nohup does
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    assert process.wait(WAIT_S) == 0


# ---- real launches


class Launched:
    """A real launch of two ranks, and the files that its ranks wrote."""

    def __init__(self, folder, *front, mode):
        (folder / "rank_program.py").write_text(RANK)
        env = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "LOCAL_RANK")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
        line = [*front, "--num_gpus", "2", "-m", "rank_program", str(folder), mode, "-m", "mine"]
        self.folder, self.log = folder, folder / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, *line], env=env, stdout=log, stderr=log)

    def facts(self):
        files = [self.folder / f"rank{rank}.json" for rank in (0, 1)]
        ready = lambda: all(f.exists() for f in files) or self.process.poll() is not None  # noqa: E731
        eventually(ready, "two ranks")
        assert all(f.exists() for f in files), self.log.read_text()
        return [json.loads(f.read_text()) for f in files]

    def all_gone(self, facts):
        pids = {fact[key] for fact in facts for key in ("pid", "parent")}
        eventually(lambda: not any(is_running(pid) for pid in pids), "all ranks to end")


@pytest.fixture
def launched(tmp_path):
    started = []

    def start(*front, mode):
        started.append(Launched(tmp_path, *front, mode=mode))
        return started[-1]

    yield start
    for job in started:
        if job.process.poll() is None:
            job.process.kill()  # the ranks watch it and exit
            job.process.wait(WAIT_S)


@pytest.mark.slow
def test_ranks_get_their_arguments_and_environment_and_a_failed_one_decides_the_code(launched):
    job = launched("-m", "wfm_ds.launch", mode="exit9")
    facts = job.facts()
    assert job.process.wait(WAIT_S) == 9
    assert "a process of the job ended with exit code 9\n" in job.log.read_text()
    for rank, fact in enumerate(facts):
        assert fact["argv"] == [f"--local_rank={rank}", str(job.folder), "exit9", "-m", "mine"]
        env = fact["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["DS_ACCELERATOR"]) == (str(rank), "2", "cpu")
        assert env["WFM_LAUNCH_PID"] == str(job.process.pid)
        assert env["MASTER_PORT"] == facts[0]["env"]["MASTER_PORT"] != RUNNERS_PORT
        assert "OMP_NUM_THREADS" not in env
        assert not Path(env["WFM_STATUS_FILE"]).parent.exists()  # removed at the end
    job.all_gone(facts)


@pytest.mark.slow
def test_a_port_in_use_is_a_one_line_error(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ["-m", "wfm_ds.train", "sd3_nft", "--tiny", f"run.output_dir={tmp_path / 'out'}"]
        result = run(sys.executable, *words, **ranks)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert f"error: port {port} is in use on this machine: choose another one with --master_port" in result.stderr


@pytest.mark.slow
def test_sigusr1_asks_all_ranks_for_a_checkpoint_and_sigterm_lets_them_save_at_the_same_time(launched):
    job = launched("-c", DRIVER, mode="save")
    facts = job.facts()
    job.process.send_signal(signal.SIGUSR1)
    until_s = time.monotonic() + WAIT_S
    while not all((job.folder / f"asked{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < until_s, job.log.read_text()
        time.sleep(0.05)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(WAIT_S) == 0, job.log.read_text()
    assert [(job.folder / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]
    job.all_gone(facts)


@pytest.mark.slow
def test_a_module_of_ours_without_a_final_status_has_failed():
    result = run(sys.executable, "-m", "wfm_ds.launch", "--num_gpus", "1", "-m", "wfm_ds.seeds")
    assert result.returncode == 1
    assert "the job ended without a final status" in result.stderr


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_command_leaves_no_process_and_the_next_start_removes_its_folder(launched):
    job = launched("-m", "wfm_ds.launch", mode="wait")
    facts = job.facts()
    job.process.kill()
    assert job.process.wait(WAIT_S) == -signal.SIGKILL
    job.all_gone(facts)
    assert job.log.read_text().count("exits: its launcher has died") >= 1
    folder = Path(facts[0]["env"]["WFM_STATUS_FILE"]).parent
    remove_orphaned_folders(folder.parent)  # every start calls this
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_inner_launcher_is_a_failure_and_leaves_no_process(launched):
    job = launched("-c", DRIVER, mode="wait")
    facts = job.facts()
    os.kill(facts[0]["parent"], signal.SIGKILL)  # DeepSpeed's own runner treats this as success
    assert job.process.wait(WAIT_S) == 1
    job.all_gone(facts)


@check_each(
    ("argv", "shields"),
    [
        (["--no_ssh", "--node_rank", "0", "-m", "wfm_ds.train", "r.yaml"], True),
        (["-m", "wfm_ds.train", "r.yaml"], True),
        (["-m", "wfm_ds.data.prepare", "r.yaml"], False),  # its ranks do not handle signals
        (["--hostfile", "hosts", "-m", "wfm_ds.train", "r.yaml"], False),
        (["script.py"], False),
    ],
)
def test_signals_to_all_processes_of_a_job_reach_ranks_but_not_deepspeed(argv, shields):
    """SLURM sends them to all processes."""
    job = launch.plan_launch(argv, {}, has_accelerator=False, has_hostfile=False)
    assert job.shields_runner is shields
    process = supervised(
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM); raise SystemExit(7)", shields=shields
    )
    assert process.wait(WAIT_S) == (7 if shields else 128 + signal.SIGTERM)


def test_a_job_that_has_no_ranks_yet_ends_soon_after_a_signal():
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    assert supervised(code, shields=True).wait(launch.TERM_WAIT_S - 5) == 128 + signal.SIGKILL
