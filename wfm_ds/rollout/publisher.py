"""The policy that samples, from the training ranks to the rollout workers: files, and what is announced of them."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.checkpoint.export import LORA_FOLDER, export
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.errors import UserError
from wfm_ds.pipes.hub import Hub
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.job import Job
from wfm_ds.run.layout import POLICY

HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PolicyFile:
    name: str  # below the publication's folder
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A publication as workers hear of it. `life` and `publication` name it; those of another life of the run
    may have the same number and other weights."""

    life: str
    publication: int  # the RL step that it follows; 0: before the first
    folder: str  # where the trainer has it: of use where the file system is shared
    files: tuple[PolicyFile, ...]

    def to_json(self) -> dict[str, Any]:
        files = [[f.name, f.num_bytes, f.sha256] for f in self.files]
        return {"life": self.life, "publication": self.publication, "folder": self.folder, "files": files}

    @classmethod
    def of_json(cls, note: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        files = tuple(PolicyFile(name, num_bytes, sha256) for name, num_bytes, sha256 in note["files"])
        return cls(note["life"], note["publication"], note["folder"], files)

    def offered(self, file: PolicyFile) -> str:
        """The name under which the hub offers a file."""
        return f"{self.life}/{self.publication}/{file.name}"


class Publisher:
    """Writes `v<N>/` after RL step N, complete or absent, and tells the hub. Every rank calls `publish`."""

    def __init__(self, job: Job, policy: str, life: str, hub: Hub | None) -> None:
        """Collective. `policy`: the one that samples. `hub`: on rank 0. What another life left is removed."""
        self.job, self.policy, self.life, self.hub = job, policy, life, hub
        self.root = Path(job.world.broadcast(str(publications(job.recipe))))
        self.kept: list[Manifest] = []
        # The newest, the S before it that samples in hand may come from, and one that a worker may still be reading.
        self.num_kept = job.recipe.rl.rollout.max_staleness + 2
        if hub is not None:
            shutil.rmtree(self.root, ignore_errors=True)

    def publish(self, publication: int) -> None:
        """Collective. Raises UserError on all ranks if the files cannot be written."""
        job, folder = self.job, self.root / f"v{publication:06d}"
        job.world.checked(
            lambda: export(
                ExportTarget.of(job.model),
                job.engine,
                folder,
                policy=self.policy,
                dtype=job.model.dtype,
                is_main=job.world.is_main,
                trained_only=True,
            )
        )
        job.world.checked(lambda: self._announce(folder, publication), on="main")

    def _announce(self, folder: Path, publication: int) -> None:
        assert self.hub is not None
        try:
            files = described(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be read ({error}); check its disk") from error
        newest = Manifest(self.life, publication, str(folder.absolute()), files)
        self.kept.append(newest)
        old, self.kept = self.kept[: -self.num_kept], self.kept[-self.num_kept :]
        offers = {m.offered(f): Path(m.folder) / f.name for m in self.kept for f in m.files}
        self.hub.announce(newest.to_json(), offers)
        for manifest in old:
            shutil.rmtree(manifest.folder, ignore_errors=True)


def publications(recipe: Recipe) -> Path:
    """The folder of this run's publications: the same for each life on this machine, another one for each run."""
    output, folder = recipe.run.output_dir.absolute(), recipe.rl.rollout.policy_folder
    if folder is None:
        return output / POLICY
    own = hashlib.sha256(f"{socket.gethostname()}:{output}".encode()).hexdigest()
    return folder.absolute() / f"{output.name}-{own[:12]}"


def remove_publications(recipe: Recipe) -> None:
    """Remove the publications of a run that has ended."""
    shutil.rmtree(publications(recipe), ignore_errors=True)


def described(folder: Path) -> tuple[PolicyFile, ...]:
    """The weights in a publication's folder. Raises OSError."""
    paths = sorted(folder.rglob("*.safetensors")) + sorted(folder.rglob(f"{LORA_FOLDER}/*.json"))
    return tuple(PolicyFile(p.relative_to(folder).as_posix(), p.stat().st_size, sha256(p)) for p in paths)


def sha256(path: Path) -> str:
    """Hex digest of a file. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def holds(folder: Path, files: Sequence[PolicyFile]) -> bool:
    """True if a folder holds exactly these bytes."""
    try:
        return all((folder / f.name).stat().st_size == f.num_bytes for f in files) and all(
            sha256(folder / f.name) == f.sha256 for f in files
        )
    except OSError:
        return False
