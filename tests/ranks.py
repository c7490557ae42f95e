"""Several real processes that form one gloo group, for tests: `ranks.run(function, **kwargs)` runs it on each of them.
With an environment of its own a single process joins what it likes (tests/gpu).

The function is sent as file and name, never by import path, its arguments and results as torch files without pickled
code. This file is both sides: the test imports it, a rank is `python ranks.py ...`.
"""

import contextlib
import datetime
import faulthandler
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import time
import traceback
from pathlib import Path

START_S = 120.0
DEADLINE_S = 300.0  # a busy machine is no failure
GRACE_S = 15.0  # for dumping stacks at the deadline, or for the other ranks to fail too after the first did


class RankError(AssertionError):
    """A rank raised or hung; the message holds its traceback or the stacks of all ranks."""


class Ranks:
    """`num_ranks` processes, started at the first run and again after one broke the group."""

    def __init__(self, num_ranks, folder, deadline_s=DEADLINE_S, environment=None):
        self.environment = environment  # of one process that forms no group; None: this process's
        self.num_ranks, self.folder, self.deadline_s = num_ranks, Path(folder), deadline_s
        self._processes, self._logs, self._calls, self._starts = [], [], 0, 0

    def run(self, function, **kwargs):
        """The function's results, by rank. Raises RankError with the traceback of the first rank that failed."""
        import torch

        if not self._processes:
            self._start()
        self._calls += 1
        arguments = self.folder / f"call_{self._calls}.pt"
        torch.save(kwargs, arguments)
        call = {"file": function.__code__.co_filename, "name": function.__name__, "arguments": str(arguments)}
        for process in self._processes:
            process.stdin.write(json.dumps(call | {"deadline_s": self.deadline_s}).encode() + b"\n")
            process.stdin.flush()
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
        """End these processes, and no others."""
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._processes = []

    def _start(self):
        self._starts += 1
        store = self.folder / f"store_{self._starts}"
        environment = None if self.environment is None else {**os.environ, **self.environment}
        for rank in range(self.num_ranks):
            log = self.folder / f"rank_{rank}_{self._starts}.log"
            self._logs = [*self._logs[-self.num_ranks + 1 :], log]
            with log.open("wb") as stderr:
                group = [] if environment is None else ["alone"]
                command = [sys.executable, __file__, str(rank), str(self.num_ranks), str(store), *group]
                pipe = subprocess.PIPE
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment)
            self._processes.append(process)
        if len(self._answers(START_S)) < self.num_ranks:
            self.stop()
            raise RankError(f"{self.num_ranks} ranks did not form a group within {START_S:g} s\n{self._tails()}")

    def _answers(self, timeout_s):
        """{rank: answer} of those that answered in time; after a first error the others have GRACE_S."""
        answers, until = {}, time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)
                    line = key.fileobj.readline()
                    if line:
                        answers[key.data] = json.loads(line)
                    if not line or "error" in answers[key.data]:
                        until = min(until, time.monotonic() + GRACE_S)
        return answers

    def _tails(self):
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in self._logs)


def main():
    """A rank: join the group, then one call per line of stdin until it closes."""
    rank, num_ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.path.append(str(Path(__file__).parent.parent))  # benchmarks/ is not installed
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints ends in the log, not among the answers
    import torch

    torch.set_num_threads(1)
    if "alone" not in sys.argv:
        join(rank, num_ranks, store)
    channel.write("{}\n")
    channel.flush()
    modules = {}
    for number, line in enumerate(sys.stdin):
        call = json.loads(line)
        faulthandler.dump_traceback_later(call["deadline_s"], exit=True)
        try:
            result = f"{store}_result_{number}_{rank}.pt"
            with unchanged_process():
                if call["file"] not in modules:
                    modules[call["file"]] = load(call["file"])
                arguments = torch.load(call["arguments"], weights_only=True)
                torch.save(getattr(modules[call["file"]], call["name"])(**arguments), result)
            answer = {"result": result}
        except Exception:  # noqa: BLE001, the border of the process: the test raises it
            answer = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


@contextlib.contextmanager
def unchanged_process():
    """Restore what a call changes of its process: calls of many test files follow each other in it."""
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


def join(rank, num_ranks, store):
    """Become a rank of a gloo group."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    files = dist.FileStore(store, num_ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=num_ranks, timeout=timeout)


def load(file):
    """The module in a file, by path. Files of several folders may have the same name."""
    name = f"{Path(file).parent.name}_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def started(num_ranks, folder, environment=None):
    """Ranks that end with the block."""
    ranks = Ranks(num_ranks, folder, environment=environment)
    try:
        yield ranks
    finally:
        ranks.stop()


if __name__ == "__main__":
    main()
