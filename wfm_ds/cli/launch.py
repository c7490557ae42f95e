"""`wfm launch`: check a recipe for a number of nodes, and write the job script or manifest that trains it there."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.cli.job_templates import (
    CONFIG_MAP,
    K8S,
    PDSH,
    PREEMPTED_CODE,
    RECIPE_MOUNT,
    RECIPE_VOLUME,
    SKYPILOT,
    SKYPILOT_SETUP,
    SLURM,
)
from wfm_ds.cli.sampling_options import parse_natural, parse_positive
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser

if TYPE_CHECKING:
    from wfm_ds.recipe.schema import Recipe

CPUS_PER_GPU = 8
MARGIN_S = 60  # between the end of the grace period and SIGKILL of the scheduler
RESTARTS = 3  # failures that Kubernetes tolerates on each node
NOT_IN_YAML = re.compile("[^\n\t -~\u00a0-\u2027\u202a-\ud7ff\ue000-\U0010ffff]")  # a YAML block would change it
MAX_NAME = 40  # Kubernetes allows 63 characters, including the number of the pod
SLURM_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")  # minutes, hours:minutes:seconds, days-hours and more


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """The job to write: the arguments of `wfm launch`, the loaded recipe, and the machines."""

    args: argparse.Namespace
    recipe: Recipe
    name: str
    nodes: int
    gpus: int  # per node
    hosts: tuple[str, ...] = ()  # host names from --pdsh

    def train_arguments(self, recipe_path: str | None = None, indent: int = 0) -> str:
        """Return the arguments of wfm_ds.train, quoted for a shell.

        recipe_path: replaces the path of the recipe. indent: spaces before each line, for use in a YAML block.
        """
        words = shlex.join([recipe_path or str(self.args.recipe), *self.args.overrides])
        if indent and (unsuitable := NOT_IN_YAML.search(words)):
            raise UserError(f"an override has the character {unsuitable[0]!r}: set this key in a recipe file instead")
        return words.replace("\n", "\n" + " " * indent)

    def common_values(self) -> dict[str, object]:
        grace_s: int = self.args.grace
        times = {"grace_s": grace_s, "signal_s": grace_s + MARGIN_S}
        return {"name": self.name, "nodes": self.nodes, "gpus": self.gpus, "preempted_code": PREEMPTED_CODE, **times}


def parser() -> CommandParser:
    p = CommandParser(
        description="Write the job script or manifest with which a scheduler trains a recipe on several machines.",
        epilog="Example: %(prog)s sd3_image_sft run.output_dir=/shared/sft --slurm --nodes 4 --gpus 8 --time 24:00:00",
    )
    p.add_recipe_arguments()
    target = p.add_mutually_exclusive_group(required=True)
    target.add_argument("--slurm", action="store_true", help="a script for sbatch")
    target.add_argument("--k8s", action="store_true", help="an indexed job for kubectl apply")
    target.add_argument("--skypilot", action="store_true", help="a task for sky launch and sky jobs launch")
    target.add_argument("--pdsh", metavar="HOSTS", help="a script for hosts with ssh: a hostfile, or node-a,node-b")
    p.add_argument("--nodes", type=parse_positive, metavar="N", help="machines (default: 1; with --pdsh all hosts)")
    p.add_argument("--gpus", type=parse_positive, default=8, metavar="G", help="GPUs per machine (default %(default)s)")
    p.add_argument("--cpus", type=parse_positive, metavar="C", help="--slurm: cores per machine (default 8 per GPU)")
    p.add_argument("--time", metavar="T", help="--slurm: time limit, such as 24:00:00 or 2-0 (days-hours)")
    p.add_argument("--accelerator", metavar="A", help="--skypilot: type of the GPUs, such as H100")
    p.add_argument("--image", help="--k8s, --skypilot: container image with wfm_ds")
    p.add_argument(
        "--volume",
        metavar="NAME:PATH",
        help="--k8s, --skypilot: volume of run.output_dir, and where it is mounted (default with --k8s shared:/shared)",
    )
    p.add_argument("--name", help="name of the job (default: name of the recipe)")
    p.add_argument(
        "--grace", type=parse_natural, default=600, metavar="S", help="seconds for the last checkpoint (default 600)"
    )
    p.add_argument("--out", metavar="FILE", help="file to write; - prints it (default: named after the job)")
    p.add_argument("--force", action="store_true", help="overwrite an existing file")
    p.add_argument("--submit", action="store_true", help="also submit the job: sbatch, kubectl, sky, or run the script")
    return p


def run(args: argparse.Namespace) -> int:
    from wfm_ds.recipe import file as recipe_file

    target = next(name for name in JOB_WRITERS if getattr(args, name) not in (None, False))
    require_fitting_options(args, target)
    hosts, gpus = read_hosts(args) if target == "pdsh" else ((), args.gpus)
    recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    nodes, name = len(hosts) or args.nodes or 1, job_name(args)
    text = JOB_WRITERS[target](ClusterJob(args, recipe, name, nodes, gpus, hosts))
    require_fitting_ranks(recipe, nodes, gpus)  # last, because it imports torch
    for warning in list_storage_warnings(args, recipe):
        sys.stderr.write(f"warning: {warning}\n")
    if args.out == "-":
        sys.stdout.write(text)
        return 0
    file = write_job(args, target, name, text)
    command = submit_command(target, name, file)
    sys.stdout.write(f"wrote {file}; {'running' if args.submit else 'next'}: {shlex.join(command)}\n")
    if args.submit:
        sys.stdout.flush()
        os.execvp(command[0], command)  # not a child process, because the pdsh script must receive Ctrl-C and SIGTERM
    return 0


def list_storage_warnings(args: argparse.Namespace, recipe: Recipe) -> list[str]:
    warnings = []
    if recipe.checkpoint.every == 0:
        warnings.append("checkpoint.every is not set: after the failure of a machine, the run starts at step 0 again")
    if args.skypilot and args.volume is None and recipe.checkpoint.storage is None:
        warnings.append(
            "the checkpoints and results are lost with the machine: add --volume NAME:PATH, or set checkpoint.storage "
            "to an S3 address"
        )
    return warnings


def require_fitting_ranks(recipe: Recipe, nodes: int, gpus: int) -> None:
    from wfm_ds.distributed.accelerator import choose_accelerator

    choose_accelerator()  # before the next import, which imports deepspeed
    from wfm_ds.training.preflight import check_rank_count

    check_rank_count(recipe, nodes * gpus, gpus)


def require_fitting_options(args: argparse.Namespace, target: str) -> None:
    allowed: dict[str, tuple[str, ...]] = {"cpus": ("slurm",), "time": ("slurm",), "accelerator": ("skypilot",)}
    allowed |= {"image": ("k8s", "skypilot"), "volume": ("k8s", "skypilot")}
    for option, targets in allowed.items():
        if getattr(args, option) is not None and target not in targets:
            raise UserError(f"--{option} {getattr(args, option)} belongs to --{' or --'.join(targets)}: remove it")
    for option, owner in (("image", "k8s"), ("accelerator", "skypilot")):
        if target == owner and getattr(args, option) is None:
            raise UserError(f"--{owner} needs --{option} (see wfm launch --help)")
    if args.time is not None and not SLURM_TIME.fullmatch(args.time):
        raise UserError(f"--time {args.time}: expected a time limit of SLURM, such as 24:00:00 or 2-0 (days-hours)")
    if args.volume is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:(/[\w.-]+)+/?", args.volume):
        raise UserError(f"--volume {args.volume}: expected NAME:PATH, such as shared:/shared")
    if args.accelerator is not None and not re.fullmatch(r"[\w.-]+", args.accelerator):
        raise UserError(f"--accelerator {args.accelerator}: expected a type such as H100; set the number with --gpus")
    tool = submit_command(target, "", Path())[0] if target != "pdsh" else "pdsh"
    if args.submit and args.out == "-":
        raise UserError("--submit needs a file: remove --out -")
    if args.submit and shutil.which(tool) is None:
        raise UserError(f"--submit: {tool} is not installed here: run wfm launch without --submit, and submit the file")


def read_hosts(args: argparse.Namespace) -> tuple[tuple[str, ...], int]:
    """Return (names, GPUs per host) of the first --nodes hosts of a hostfile, or of a list such as node-a,node-b.

    Raises UserError if there are too few hosts, if a line is invalid, or if hosts have different numbers of slots.
    """
    path = Path(args.pdsh)
    if not path.is_file() and "/" in args.pdsh:
        raise UserError(f"--pdsh {args.pdsh}: file not found")
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else args.pdsh.split(",")
    lines = [line.partition("#")[0].strip() for line in lines]
    pattern = re.compile(r"([\w.-]+)(?:\s+slots=([1-9]\d*))?")
    matches = [(line, pattern.fullmatch(line)) for line in lines if line]
    names, slots = [], []
    for line, match in matches[: args.nodes]:
        if match is None:
            raise UserError(f"--pdsh {args.pdsh}: {line!r} is not a host such as node-a slots=8")
        names.append(match[1])
        slots.append(int(match[2] or args.gpus))
    if not names or len(names) < (args.nodes or 1):
        raise UserError(f"--pdsh {args.pdsh}: {len(names)} hosts, but --nodes {args.nodes or 1} are needed")
    if len(set(names)) < len(names) or len(set(slots)) > 1:
        raise UserError(f"--pdsh {args.pdsh}: name each host once, all with the same number of slots")
    return tuple(names), slots[0]


def job_name(args: argparse.Namespace) -> str:
    from wfm_ds.recipe.file import resolve_recipe_path
    from wfm_ds.recipe.shipped_recipes import recipe_name

    text = args.name if args.name is not None else recipe_name(resolve_recipe_path(args.recipe))
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")
    if args.name is not None and (name != args.name or not name[:1].isalpha()):
        raise UserError(
            f"--name {args.name}: expected up to {MAX_NAME} lower-case letters, digits and hyphens, starting with a "
            "letter"
        )
    return name if name[:1].isalpha() else f"wfm-{name}"


def format_slurm(job: ClusterJob) -> str:
    return SLURM.substitute(
        job.common_values(),
        cpus=job.args.cpus or CPUS_PER_GPU * job.gpus,
        time_line="" if job.args.time is None else f"#SBATCH --time={job.args.time}\n",
        arguments=job.train_arguments(),
    )


def format_k8s(job: ClusterJob) -> str:
    from wfm_ds.recipe.file import read_recipe_tree
    from wfm_ds.recipe.tree import to_yaml

    claim, mount_path = read_volume(job.args.volume or "shared:/shared", job.recipe)
    is_file = job.args.recipe.exists()
    config_map = ""
    if is_file:
        text = to_yaml(read_recipe_tree(job.args.recipe).values)
        config_map = CONFIG_MAP.substitute(name=job.name, recipe=textwrap.indent(text.rstrip("\n"), "    "))
    return K8S.substitute(
        job.common_values(),
        claim=claim,
        mount_path=mount_path,
        image=json.dumps(job.args.image),
        last=job.nodes - 1,
        backoff=RESTARTS * job.nodes,  # one failure ends the pods of all nodes
        config_map=config_map,
        recipe_mount=RECIPE_MOUNT if is_file else "",
        recipe_volume=RECIPE_VOLUME.substitute(name=job.name) if is_file else "",
        arguments=job.train_arguments("/etc/wfm/recipe.yaml" if is_file else None, indent=14),
    )


def format_skypilot(job: ClusterJob) -> str:
    recipe_path = None
    if job.args.recipe.exists():
        file, folder = job.args.recipe.resolve(), Path.cwd()
        if not file.is_relative_to(folder):
            raise UserError(
                f"{job.args.recipe} is outside the current folder, which SkyPilot copies to the machines: move it"
            )
        recipe_path = str(file.relative_to(folder))
    volume_lines = ""
    if job.args.volume is not None:
        volume, mount_path = read_volume(job.args.volume, job.recipe)
        volume_lines = f'volumes:\n  {mount_path}: "{volume}"\n'
    elif job.nodes > 1:
        raise UserError(f"--nodes {job.nodes}: all machines must share run.output_dir: add --volume NAME:PATH")
    return SKYPILOT.substitute(
        job.common_values(),
        accelerator=job.args.accelerator,
        image_line="" if job.args.image is None else f"  image_id: {json.dumps(f'docker:{job.args.image}')}\n",
        setup_lines=SKYPILOT_SETUP if job.args.image is None else "",
        volume_lines=volume_lines,
        arguments=job.train_arguments(recipe_path, indent=2),
    )


def format_pdsh(job: ClusterJob) -> str:
    pattern = rf"[w]fm_ds\.train --local_rank=0 {re.escape(' '.join([str(job.args.recipe), *job.args.overrides]))}"
    return PDSH.substitute(
        job.common_values(),
        folder=shlex.quote(str(Path.cwd())),
        head=job.hosts[0],
        host_lines=" ".join(f"'{host} slots={job.gpus}'" for host in job.hosts),
        pkill=shlex.quote(f"pkill -TERM -f -- {shlex.quote(pattern)}"),
        arguments=job.train_arguments(),
    )


JOB_WRITERS: dict[str, Callable[[ClusterJob], str]] = {
    "slurm": format_slurm,
    "k8s": format_k8s,
    "skypilot": format_skypilot,
    "pdsh": format_pdsh,
}


def read_volume(volume: str, recipe: Recipe) -> tuple[str, str]:
    """Return (name, path at which it is mounted) of --volume. Raises UserError if run.output_dir is not on it."""
    name, _, mount_path = volume.rstrip("/").partition(":")  # SkyPilot refuses paths that end with a slash
    folder = recipe.run.output_dir
    if not folder.is_relative_to(mount_path):
        raise UserError(
            f"run.output_dir {folder} is not on the volume {volume}: set run.output_dir={mount_path}/NAME, "
            "or choose another volume with --volume"
        )
    return name, mount_path


def write_job(args: argparse.Namespace, target: str, name: str, text: str) -> Path:
    suffix = {"slurm": "sbatch", "k8s": "k8s.yaml", "skypilot": "sky.yaml", "pdsh": "pdsh.sh"}[target]
    file = Path(args.out) if args.out is not None else Path(f"{name}.{suffix}")
    if file.exists() and not args.force and file.read_bytes() != text.encode():
        raise UserError(f"{file} exists: choose another file with --out, or overwrite it with --force")
    if not file.parent.is_dir():
        raise UserError(f"{file}: folder {file.parent} not found")
    file.write_text(text, "utf-8")
    return file


def submit_command(target: str, name: str, file: Path) -> list[str]:
    return {
        "slurm": ["sbatch", str(file)],
        "k8s": ["kubectl", "apply", "-f", str(file)],
        "skypilot": ["sky", "launch", "-c", name, str(file)],
        "pdsh": ["bash", str(file)],
    }[target]
