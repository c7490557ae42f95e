"""Publishes the rollout policy to the rollout workers, as weight files and a manifest."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from wfm_ds.distributed.world import World
from wfm_ds.errors import UserError
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weight_files import create_part_folders, plan_weight_files, write_weight_files
from wfm_ds.export.weights import LORA_FOLDER, export_weights
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.job import Job
from wfm_ds.runs.layout import POLICY
from wfm_ds.transport.broker import Broker


class PolicyFile(NamedTuple):
    name: str  # path relative to the publication's folder
    num_bytes: int
    xxh3: str  # see `hash_file`


@dataclass(frozen=True, slots=True)
class PolicyManifest:
    """Files of one published policy. A session is one process of the run, from start or resume to exit."""

    session_id: str
    publication: int  # number of the RL step that produced the weights; 0 for the weights before the first step
    folder: str  # path on the trainer; used if the worker sees the same file system
    files: tuple[PolicyFile, ...]

    def to_json(self) -> dict[str, Any]:
        files = [list(file) for file in self.files]
        return {"life": self.session_id, "publication": self.publication, "folder": self.folder, "files": files}

    @classmethod
    def from_json(cls, note: Mapping[str, Any]) -> PolicyManifest:
        """Undo `to_json`. Raises KeyError, TypeError or ValueError if the note is malformed."""
        files = tuple(PolicyFile(*file) for file in note["files"])
        return cls(note["life"], note["publication"], note["folder"], files)

    def offer_name(self, file: PolicyFile) -> str:
        """Return the name by which workers request this file from the broker."""
        return f"{self.session_id}/{self.publication}/{file.name}"


class PolicyPublisher:
    """Writes the policy after RL step N to the folder `v<N>` and announces it. All ranks must call every method."""

    def __init__(self, job: Job, policy: str, session_id: str, broker: Broker | None) -> None:
        """Delete the weights of earlier sessions. All ranks must call this.

        policy: name of the policy that generates the samples. broker: None except on rank 0.
        """
        self.job, self.policy, self.session_id, self.broker = job, policy, session_id, broker
        self.root = Path(job.world.broadcast(str(publications_folder(job.recipe))))
        self.retained: list[PolicyManifest] = []
        # Keep the newest publication, max_staleness older ones that workers may use, and one that a worker may still
        # be reading.
        self.num_retained = job.recipe.rl.rollout.max_staleness + 2
        if broker is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        self.writers = [0] if job.engine.uses_lora else find_writers(job.world, self.root)

    def publish(self, publication: int) -> None:
        """Export and announce the policy. All ranks must call this, and raise UserError if files cannot be written."""
        folder = self.root / f"v{publication:06d}"
        files = self._write_adapter(folder) if self.job.engine.uses_lora else self._write_full_weights(folder)
        if self.broker is None:
            return
        newest = PolicyManifest(self.session_id, publication, str(folder.absolute()), files)
        self.retained.append(newest)
        expired, self.retained = self.retained[: -self.num_retained], self.retained[-self.num_retained :]
        offers = {m.offer_name(f): Path(m.folder) / f.name for m in self.retained for f in m.files}
        self.broker.announce(newest.to_json(), offers)
        for manifest in expired:
            shutil.rmtree(manifest.folder, ignore_errors=True)

    def _write_adapter(self, folder: Path) -> tuple[PolicyFile, ...]:
        """Write the LoRA. Return its files on rank 0."""
        job = self.job
        job.world.run_checked(
            lambda: export_weights(
                ExportTarget.from_model(job.model),
                job.engine,
                folder,
                policy=self.policy,
                dtype=job.model.dtype,
                is_main=job.world.is_main,
                for_workers=True,
            )
        )
        return job.world.run_checked(lambda: list_policy_files(folder), on="main") or ()

    def _write_full_weights(self, folder: Path) -> tuple[PolicyFile, ...]:
        """Write the denoiser: each rank in `writers` writes and hashes its own files. Return all files on each rank."""
        job, world, target = self.job, self.job.world, ExportTarget.from_model(self.job.model)
        plan = plan_weight_files(target, job.model.dtype, self.writers)

        def write_own_files() -> tuple[PolicyFile, ...]:
            paths = write_weight_files(
                target, job.engine, plan, folder, policy=self.policy, dtype=job.model.dtype, rank=world.rank
            )
            return describe_files(folder, paths)

        try:
            world.run_checked(lambda: create_part_folders(target, plan, folder), on="main")
            by_rank = world.gather(world.run_checked(write_own_files))
        except UserError:
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return tuple(PolicyFile(*file) for files in by_rank for file in files)


def publications_folder(recipe: Recipe) -> Path:
    """Return the folder for the weights that this run publishes on this machine. All sessions of the run use it."""
    output, folder = recipe.run.output_dir.absolute(), recipe.rl.rollout.policy_folder
    if folder is None:
        return output / POLICY
    run_hash = hashlib.sha256(f"{socket.gethostname()}:{output}".encode()).hexdigest()
    return folder.absolute() / f"{output.name}-{run_hash[:12]}"


def remove_publications(recipe: Recipe) -> None:
    shutil.rmtree(publications_folder(recipe), ignore_errors=True)


def find_writers(world: World, root: Path) -> list[int]:
    """Return the ranks that can write to rank 0's folder `root`, which may be on a disk of one machine.

    All ranks must call this. Raises UserError if rank 0 cannot write to the folder.
    """
    probe, can_write = root / f"writers-{world.broadcast(secrets.token_hex(8))}", True

    def create_probe() -> None:
        try:
            probe.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{root} cannot be written ({error}): fix the folder") from error

    world.run_checked(create_probe, on="main")
    try:
        (probe / str(world.rank)).touch(exist_ok=False)
    except OSError:
        can_write = False
    writers = [rank for rank, is_writer in enumerate(world.gather(can_write)) if is_writer]
    if world.is_main:
        shutil.rmtree(probe, ignore_errors=True)
    return writers


def list_policy_files(folder: Path) -> tuple[PolicyFile, ...]:
    """Return name, size and hash of each weight file in a folder. Raises UserError if a file cannot be read."""
    return describe_files(
        folder, [*sorted(folder.rglob("*.safetensors")), *sorted(folder.rglob(f"{LORA_FOLDER}/*.json"))]
    )


def describe_files(folder: Path, paths: Sequence[Path]) -> tuple[PolicyFile, ...]:
    """Return name, size and hash of files in a folder. Raises UserError if a file cannot be read."""
    try:
        return tuple(PolicyFile(p.relative_to(folder).as_posix(), p.stat().st_size, hash_file(p)) for p in paths)
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error}): check the disk") from error


def hash_file(path: Path) -> str:
    """Return the XXH3 hash (128 bits) of a file as hex digits. Raises OSError if the file cannot be read.

    The hash detects incomplete, stale and wrong files, such as files of another run at the same path. It is not a
    protection against attackers, and a cryptographic hash would not be one either: the worker opens a shared file again
    after the check, so whoever can write to the folder can replace it. Keys protect weights that are sent.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def has_files(folder: Path, files: Sequence[PolicyFile]) -> bool:
    try:
        return all((folder / f.name).stat().st_size == f.num_bytes for f in files) and all(
            hash_file(folder / f.name) == f.xxh3 for f in files
        )
    except OSError:
        return False
