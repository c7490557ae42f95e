"""Findings of doctor.py about this machine and the others of a hostfile; none of them needs a recipe."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from wfm_ds.distributed.accelerator import accelerator_present, uses_cuda
from wfm_ds.doctor.finding import Finding, Level
from wfm_ds.errors import RecipeError
from wfm_ds.monitoring.stopwatch import GIB

PACKAGES = ("torch", "deepspeed", "diffusers", "transformers", "peft", "triton")
OPTIONAL = ("triton",)
TESTED_DEEPSPEED = "0.19.8"
CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"  # the versions that the tests ran with
MIN_SHM_BYTES = GIB  # NCCL takes some ten MiB of it for each pair of ranks on a machine
MIN_OPEN_FILES = 4096  # a rank holds sockets, shards of data and checkpoint files
SSH_TIMEOUT_S = 10
MAX_CLOCK_DIFFERENCE_S = 2.0  # more, and logs and timestamps of checkpoints of several hosts mislead


def machine_findings() -> Iterator[Finding]:
    yield python_finding()
    yield from (version_finding(package) for package in PACKAGES)
    yield gpu_finding()
    yield shm_finding()
    yield open_files_finding()


# ---- versions


def python_finding() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def version_finding(package: str) -> Finding:
    """The installed version, against what wfm_ds and the package itself ask for."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package in OPTIONAL:
            return Finding(package, "warning", "not installed: kernels are plain torch", f"pip install {package}")
        return Finding(package, "error", "not installed", 'pip install -e ".[dev]" in the repository')
    wrong = [
        f"{asker} asks for {requirement}, {found or 'which is missing'} is there"
        for asker in ("wfm_ds", package)
        for requirement, found in unmet(asker)
        if asker == package or requirement.name == package
    ]
    if wrong:
        return Finding(package, "error", f"{version}: {'; '.join(wrong)}", "pip install -e . -c constraints.txt")
    tested = tested_versions(CONSTRAINTS).get(package)
    if package == "deepspeed" and version.partition("+")[0] != TESTED_DEEPSPEED:
        text = f"{version}: the engine relies on internals of DeepSpeed, and was tested with {TESTED_DEEPSPEED} only"
        return Finding(package, "warning", text, f"pip install deepspeed=={TESTED_DEEPSPEED}")
    is_other = tested is not None and tested != version.partition("+")[0]
    return Finding(package, "ok", f"{version}{f', tests ran with {tested}' if is_other else ''}")


def unmet(package: str) -> Iterator[tuple[Requirement, str | None]]:
    """List the requirements of a package that this machine does not meet, with the version that is there; extras left
    out."""
    try:
        texts = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        texts = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # written by the package's authors; pip had its say
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield requirement, None
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield requirement, found


def tested_versions(path: Path) -> dict[str, str]:
    """{package: version} of a constraints file; empty where the repository is not at hand."""
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


# ---- the machine


def gpu_finding() -> Finding:
    import torch

    if uses_cuda():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(len(names))) / GIB
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        models = ", ".join(sorted(set(names)))
        text = f"{len(names)} x {models}, at least {free:.1f} GiB free each; CUDA {torch.version.cuda}, NCCL {nccl}"
        return Finding("gpu", "ok", text)
    if not accelerator_present():
        return Finding("gpu", "warning", "none: runs take the CPU and gloo, which is for small models")
    if torch.cuda.is_available():
        return Finding("gpu", "warning", f"not used, as DS_ACCELERATOR={os.environ['DS_ACCELERATOR']} says")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Finding(
        "gpu",
        "error",
        f"this machine has an accelerator that torch {torch.__version__} ({build}) cannot use",
        "install the torch build for the driver (nvidia-smi names its CUDA version)",
    )


def shm_finding(folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.is_dir():
        return Finding("shared memory", "warning", f"there is no {folder}", "NCCL needs it: mount a tmpfs there")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.2f} GiB free in {folder}"
    if free < MIN_SHM_BYTES:
        return Finding("shared memory", "warning", text, "NCCL may fail: docker run --shm-size=16g, or --ipc=host")
    return Finding("shared memory", "ok", text)


def open_files_finding() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return Finding("open files", "warning", f"a process may open {soft} files", f"ulimit -n {hard}")
    return Finding("open files", "ok", f"a process may open {soft} files")


def port_finding(port: int, *, is_needed: bool) -> Finding:
    """Return whether the port at which ranks meet is free here. Launches on one machine choose a free one by
    themselves."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            level: Level = "error" if is_needed else "warning"
            return Finding("master port", level, f"{port}: {error.strerror}", "pass another one: --master_port PORT")
    return Finding("master port", "ok", f"{port} is free on this machine")


# ---- the hosts of a hostfile


def host_findings(hostfile: Path) -> list[Finding]:
    """Check that each host answers without a password and that its clock agrees. Raises RecipeError for the file."""
    hosts = hosts_of(hostfile)
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return list(pool.map(host_finding, hosts))


def hosts_of(hostfile: Path) -> list[str]:
    """The names in DeepSpeed's format, `NAME slots=N` a line."""
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{hostfile}: cannot be read: {error}") from error
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    hosts = [words[0] for words in lines if words]
    if not hosts:
        raise RecipeError(f"{hostfile}: no host is named; expected lines like `node1 slots=8`")
    wrong = [words[0] for words in lines if words and not any(word.startswith("slots=") for word in words[1:])]
    if wrong or any(host.startswith("-") for host in hosts):
        raise RecipeError(f"{hostfile}: expected lines like `node1 slots=8`, got {(wrong or hosts)[0]}")
    return hosts


def host_finding(host: str) -> Finding:
    name = f"host {host}"
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}", host, "date", "+%s.%N"]
    before = time.time()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * SSH_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return Finding(name, "error", "there is no ssh on this machine", "install it: the launcher needs it too")
    except subprocess.TimeoutExpired:
        return Finding(name, "error", f"no answer in {2 * SSH_TIMEOUT_S} s", f"try: ssh {host} true")
    after = time.time()
    if done.returncode:
        reason = (done.stderr.strip() or f"ssh ended with {done.returncode}").splitlines()[-1]
        return Finding(name, "error", reason, f"ssh {host} true must work without a password: ssh-copy-id {host}")
    try:
        clock = float(done.stdout.split()[-1])
    except (IndexError, ValueError):
        return Finding(name, "warning", "answers, but does not tell the time", f"try: ssh {host} date +%s.%N")
    return clock_finding(name, clock, before, after)


def clock_finding(name: str, clock: float, before: float, after: float) -> Finding:
    """A clock that was read at some time between `before` and `after`, all in seconds."""
    difference = max(before - clock, clock - after, 0.0)  # what the travel time does not explain
    text = f"answers in {after - before:.1f} s, its clock differs by {difference:.1f} s at least"
    if difference > MAX_CLOCK_DIFFERENCE_S:
        return Finding(name, "warning", text, "let chrony or ntpd set the clocks: times in logs would mislead")
    return Finding(name, "ok", text)
