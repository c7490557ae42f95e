"""Check this machine and the hosts in a hostfile. Needs no recipe."""

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

from wfm_ds.cli.doctor.finding import DoctorFinding, FindingLevel
from wfm_ds.distributed.accelerator import is_accelerator_present, uses_cuda
from wfm_ds.errors import RecipeError
from wfm_ds.monitoring.meters import GIB
from wfm_ds.storage.filesystem import read_regular

CHECKED_PACKAGES = ("torch", "deepspeed", "diffusers", "transformers", "peft", "triton")
OPTIONAL_PACKAGES = ("triton",)
TESTED_DEEPSPEED = "0.19.8"
CONSTRAINTS_FILE = Path(__file__).parent.parent.parent / "constraints.txt"  # tested versions
MIN_SHM_BYTES = GIB  # NCCL uses about 10 MiB for each pair of ranks on a machine
MIN_OPEN_FILES = 4096  # a rank opens sockets, data shards and checkpoint files
SSH_TIMEOUT_S = 10
MAX_CLOCK_DIFFERENCE_S = 2.0  # above it, log and checkpoint times of hosts are hard to compare


def machine_findings() -> Iterator[DoctorFinding]:
    yield DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield from (version_finding(package) for package in CHECKED_PACKAGES)
    yield gpu_finding()
    yield shm_finding()
    yield open_files_finding()


# ---- versions


def version_finding(package: str) -> DoctorFinding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package in OPTIONAL_PACKAGES:
            return DoctorFinding(package, "warning", "not installed: using eager torch", f"pip install {package}")
        return DoctorFinding(package, "error", "not installed", 'pip install -e ".[dev]" in the repository')
    conflicts = [
        f"{dependent} requires {requirement}, {f'found {installed}' if installed else 'which is not installed'}"
        for dependent in ("wfm_ds", package)
        for requirement, installed in unmet_requirements(dependent)
        if dependent == package or requirement.name == package
    ]
    if conflicts:
        return DoctorFinding(
            package, "error", f"{version}: {'; '.join(conflicts)}", "pip install -e . -c constraints.txt"
        )
    tested = read_constraints(CONSTRAINTS_FILE).get(package)
    if package == "deepspeed" and version.partition("+")[0] != TESTED_DEEPSPEED:
        text = f"{version}: the engine depends on DeepSpeed internals and was only tested with {TESTED_DEEPSPEED}"
        return DoctorFinding(package, "warning", text, f"pip install deepspeed=={TESTED_DEEPSPEED}")
    is_other = tested is not None and tested != version.partition("+")[0]
    return DoctorFinding(package, "ok", f"{version}{f' (tested with {tested})' if is_other else ''}")


def unmet_requirements(package: str) -> Iterator[tuple[Requirement, str | None]]:
    """Yield (requirement, installed version or None) for each unmet requirement of a package, without extras."""
    try:
        texts = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        texts = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # invalid package metadata, which pip accepted
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield requirement, None
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield requirement, installed


def read_constraints(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


# ---- the machine


def gpu_finding() -> DoctorFinding:
    import torch

    if uses_cuda():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(len(names))) / GIB
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        models = ", ".join(sorted(set(names)))
        text = f"{len(names)} x {models}, at least {free:.1f} GiB free each; CUDA {torch.version.cuda}, NCCL {nccl}"
        return DoctorFinding("gpu", "ok", text)
    if not is_accelerator_present():
        return DoctorFinding("gpu", "warning", "none: runs use the CPU and gloo, for small models only")
    if torch.cuda.is_available():
        return DoctorFinding("gpu", "warning", f"not used because of DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return DoctorFinding(
        "gpu",
        "error",
        f"torch {torch.__version__} ({build}) cannot use the accelerator of this machine",
        "install the torch build for the driver's CUDA version (see nvidia-smi)",
    )


def shm_finding(folder: Path = Path("/dev/shm")) -> DoctorFinding:
    name = "shared memory"
    if not folder.is_dir():
        return DoctorFinding(name, "warning", f"{folder} does not exist", "mount a tmpfs there: NCCL needs it")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.2f} GiB free in {folder}"
    if free < MIN_SHM_BYTES:
        return DoctorFinding(name, "warning", text, "NCCL may fail: docker run --shm-size=16g, or --ipc=host")
    return DoctorFinding(name, "ok", text)


def open_files_finding() -> DoctorFinding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return DoctorFinding("open files", "warning", f"a process may open {soft} files", f"ulimit -n {hard}")
    return DoctorFinding("open files", "ok", f"a process may open {soft} files")


def port_finding(port: int, *, is_needed: bool) -> DoctorFinding:
    """Check that the launcher's master port is free.

    is_needed: True: a busy port is an error. False: it is a warning, because the run can choose another port.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            level: FindingLevel = "error" if is_needed else "warning"
            text = f"{port}: {error.strerror}"
            return DoctorFinding("master port", level, text, "choose another port: --master_port PORT")
    return DoctorFinding("master port", "ok", f"{port} is free on this machine")


# ---- the hosts of a hostfile


def host_findings(hostfile: Path) -> list[DoctorFinding]:
    """Check all hosts: their clock, and ssh without password. Raises RecipeError if the hostfile is invalid."""
    hosts = read_hosts(hostfile)
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return list(pool.map(host_finding, hosts))


def read_hosts(hostfile: Path) -> list[str]:
    try:
        text = read_regular(hostfile).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{hostfile}: cannot be read: {error}") from error
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    hosts = [fields[0] for fields in lines if fields]
    if not hosts:
        raise RecipeError(f"{hostfile}: no hosts; expected lines like `node1 slots=8`")
    invalid = [fields[0] for fields in lines if fields and not any(f.startswith("slots=") for f in fields[1:])]
    if invalid or any(host.startswith("-") for host in hosts):
        raise RecipeError(f"{hostfile}: expected lines like `node1 slots=8`, got {(invalid or hosts)[0]}")
    return hosts


def host_finding(host: str) -> DoctorFinding:
    name = f"host {host}"
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}", host, "date", "+%s.%N"]
    before = time.time()
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * SSH_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return DoctorFinding(
            name, "error", "ssh is not installed on this machine", "install it: the launcher needs it too"
        )
    except subprocess.TimeoutExpired:
        return DoctorFinding(name, "error", f"no answer in {2 * SSH_TIMEOUT_S} s", f"try: ssh {host} true")
    after = time.time()
    if process.returncode:
        reason = (process.stderr.strip() or f"ssh exited with {process.returncode}").splitlines()[-1]
        return DoctorFinding(name, "error", reason, f"ssh {host} true must work without a password: ssh-copy-id {host}")
    try:
        clock = float(process.stdout.split()[-1])
    except (IndexError, ValueError):
        return DoctorFinding(name, "warning", "reachable, but `date` does not work", f"try: ssh {host} date +%s.%N")
    return clock_finding(name, clock, before, after)


def clock_finding(name: str, clock: float, before: float, after: float) -> DoctorFinding:
    """Compare a host's clock with the local one. All times are Unix times in seconds.

    clock: time read from the host. before, after: local times before and after reading it.
    """
    difference = max(before - clock, clock - after, 0.0)  # beyond what the response time explains
    text = f"answered in {after - before:.1f} s, clock differs by at least {difference:.1f} s"
    if difference > MAX_CLOCK_DIFFERENCE_S:
        return DoctorFinding(name, "warning", text, "synchronize the clocks with chrony or ntpd")
    return DoctorFinding(name, "ok", text)
