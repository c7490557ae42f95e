"""Run test functions on several real processes that form one gloo group: `ranks.run(function, **kwargs)`.

All pools of a test run fork their processes from one server, which has imported the heavy packages: importing torch,
DeepSpeed and diffusers takes longer than most tests. With `environment`, a single process is started without a group
and without the server, and its functions join a group themselves (tests/gpu).

A function is sent as file path and name, never as import path. Arguments and results are sent as torch files without
pickled code.
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

START_S = 120.0
DEADLINE_S = 300.0  # long enough for a busy machine
GRACE_S = 15.0  # to dump stacks after the deadline, or for the other ranks to fail after the first one
PRELOADED = [
    "pytest",
    "wfm_ds.train",
    "wfm_ds.training.rl",
    "wfm_ds.training.sft",
    "wfm_ds.training.language_loop",
    "torch.utils.tensorboard",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # deepspeed.initialize imports it, and it imports the torch compiler
]


class RankError(AssertionError):
    """A rank raised or hung. The message has its traceback or the stacks of all ranks."""


class Ranks:
    """A pool of `num_ranks` processes. They start at the first run, and again after a failure that broke the group."""

    def __init__(self, num_ranks, folder, deadline_s=DEADLINE_S, environment=None):
        self.environment = environment  # extra variables; if given, the process does not join a group
        self.num_ranks, self.folder, self.deadline_s = num_ranks, Path(folder), deadline_s
        self._processes, self._pipes, self._logs, self._calls, self._starts = [], [], [], 0, 0

    def run(self, function, **kwargs):
        """Run the function on all ranks and return its results by rank.

        Raises RankError with the traceback of the lowest rank that failed.
        """
        import torch

        if not self._processes:
            self._start()
        self._calls += 1
        arguments = self.folder / f"call_{self._calls}.pt"
        torch.save(kwargs, arguments)
        call = {"file": function.__code__.co_filename, "name": function.__name__, "arguments": str(arguments)}
        for pipe in self._pipes:
            pipe.send(call | {"deadline_s": self.deadline_s})
        answers = self._answers(self.deadline_s + GRACE_S)
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if len(answers) < self.num_ranks:
            self.stop()
        if failed:
            rank = min(failed)
            raise RankError(f"rank {rank} of {self.num_ranks} raised in {function.__name__}:\n{failed[rank]}")
        if len(answers) < self.num_ranks:
            raise RankError(f"{function.__name__} did not end within {self.deadline_s:g} s\n{self._tails()}")
        return [torch.load(answers[rank]["result"], weights_only=True) for rank in range(self.num_ranks)]

    def stop(self):
        """Kill the processes of this pool."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self):
        self._starts += 1
        store = str(self.folder / f"store_{self._starts}")
        self._logs = [self.folder / f"rank_{rank}_{self._starts}.log" for rank in range(self.num_ranks)]
        can_fork = self.environment is None and sys.platform == "linux"  # elsewhere forks of threaded libraries crash
        context = multiprocessing.get_context("forkserver" if can_fork else "spawn")
        context.set_forkserver_preload(PRELOADED)
        for rank, log in enumerate(self._logs):
            here, there = context.Pipe()
            group = (rank, self.num_ranks, store) if self.environment is None else None
            environment = {**os.environ, **(self.environment or {})}
            arguments = (there, str(log), environment, f"{store}_rank_{rank}", group)
            process = context.Process(target=serve_calls, args=arguments)
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
                process.start()  # the first one starts the server, which must import the code under test
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        if len(self._answers(START_S)) < self.num_ranks:
            self.stop()
            raise RankError(f"{self.num_ranks} ranks did not form a group within {START_S:g} s\n{self._tails()}")

    def _answers(self, timeout_s):
        """Return {rank: answer} of the ranks that answered in time. After an error, the others have GRACE_S left."""
        answers, waiting, until = {}, list(self._pipes), time.monotonic() + timeout_s
        while waiting and (left := until - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(waiting, left):
                waiting.remove(pipe)
                answer = {"error": None}
                with contextlib.suppress(EOFError, ConnectionError):  # the process has ended
                    answer = answers[self._pipes.index(pipe)] = pipe.recv()
                if "error" in answer:
                    until = min(until, time.monotonic() + GRACE_S)
        return answers

    def _tails(self):
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in self._logs)


def serve_calls(pipe, log, environment, results, group):
    """Run one rank: join the group (rank, number of ranks, store) if any, then execute calls until the pipe closes."""
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.append(str(Path(__file__).parent.parent))  # benchmarks/ is not installed
    import torch

    gc.freeze()  # DeepSpeed collects garbage often, which takes half a second with all imported packages
    torch.set_num_threads(1)
    if group:
        join(*group)
    pipe.send({})
    modules, number = {}, 0
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(call["deadline_s"], exit=True)
        number += 1
        try:
            result = f"{results}_result_{number}.pt"
            with unchanged_process():
                if call["file"] not in modules:
                    modules[call["file"]] = load(call["file"])
                arguments = torch.load(call["arguments"], weights_only=True)
                torch.save(getattr(modules[call["file"]], call["name"])(**arguments), result)
            answer = {"result": result}
        except Exception:  # noqa: BLE001, sent to the test process, which raises it
            answer = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
        gc.collect()
        gc.freeze()  # later collections skip what is alive now, mostly modules that the call has imported


@contextlib.contextmanager
def unchanged_process():
    """Restore the process's global state after a call, because calls of many test files share the process."""
    import torch

    environment, folder, path = dict(os.environ), os.getcwd(), list(sys.path)
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        release_engines()


def release_engines():
    """Free the DeepSpeed engines and process groups of a call.

    Hooks keep engines in memory, and every process group keeps three threads running. Without this, each call is slower
    than the one before.
    """
    import torch.distributed as dist
    from deepspeed import DeepSpeedEngine, comm

    if not comm.is_initialized():
        return
    for engine in [found for found in gc.get_objects() if issubclass(type(found), DeepSpeedEngine)]:
        engine.destroy()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            comm.destroy_process_group(group)


def join(rank, num_ranks, store):
    """Join the gloo group as `rank`."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    files = dist.FileStore(store, num_ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=num_ranks, timeout=timeout)


def load(file):
    """Import a module by file path. Files in different folders may have the same name."""
    name = f"{Path(file).parent.name}_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


def attempt(call, kind):
    """Return the message of the error of type `kind` that the call raises, else "no error"."""
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def started(num_ranks, folder, environment=None):
    """Yield a pool of ranks and stop it at the end."""
    ranks = Ranks(num_ranks, folder, environment=environment)
    try:
        yield ranks
    finally:
        ranks.stop()
