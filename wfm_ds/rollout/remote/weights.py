"""Loads the published policy into the model of a rollout worker."""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wfm_ds.checkpoint.adapter_loading import adapter_tensor_names, copy_whole_layers, load_adapter
from wfm_ds.engine.adapter_layers import AdapterMerge, find_adapter_layers
from wfm_ds.errors import UserError
from wfm_ds.export.lora_file import read_whole_layers
from wfm_ds.export.weights import LORA_FILES, LORA_FOLDER, LORA_PREFIX, diffusers_name
from wfm_ds.models.base import DiffusionModel, matches_any_pattern
from wfm_ds.rollout.remote.publisher import PolicyManifest, has_files
from wfm_ds.storage import atomic
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.sockets import PipeError
from wfm_ds.transport.worker import TaskFailed

log = logging.getLogger(__name__)

PIECE_TIMEOUT_S = 60.0  # maximum wait for one piece of a file
FILE_NAME = re.compile(r"[\w-]+/[\w.-]+")  # exactly one folder deep: a path cannot leave the publication's folder


class PolicyWeights:
    """Loads published versions of the policy into the model's denoiser. Not thread-safe."""

    def __init__(self, model: DiffusionModel, client: PipeClient, *, lora: bool, merge: bool = False) -> None:
        """client: connection to the trainer's broker. lora: the policy is an adapter. merge: merge it into the base."""
        self.model, self.client, self.lora, self.merge = model, client, lora, merge
        self.loaded_manifest: PolicyManifest | None = None
        self._has_adapter = False
        self._adapter_merge: AdapterMerge | None = None

    def load_publication(self, manifest: PolicyManifest) -> int:
        """Load the weights that the manifest describes. Returns the publication number of the weights in the model.

        Nothing is loaded if the model already has these weights or newer weights of the same session. Raises a
        non-fatal TaskFailed if the weights cannot be downloaded or loaded, and a fatal one for invalid file names. If
        loading fails, the weights are undefined until the next call succeeds.
        """
        current = self.loaded_manifest
        if (
            current is not None
            and current.session_id == manifest.session_id
            and current.publication >= manifest.publication
        ):
            return current.publication
        with self._open_folder(manifest) as folder:
            self.loaded_manifest = None  # until all weights are loaded
            try:
                self._load_weights(folder)
            except (UserError, OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
                raise TaskFailed(
                    f"publication {manifest.publication} cannot be loaded: {error}", fatal=False
                ) from error
        self.loaded_manifest = manifest
        log.info("loaded publication %d", manifest.publication)
        return manifest.publication

    @contextlib.contextmanager
    def _open_folder(self, manifest: PolicyManifest) -> Iterator[Path]:
        """Yield a folder with the files, downloaded if needed. Raises TaskFailed if a file is missing or wrong."""
        if not manifest.files or not all(FILE_NAME.fullmatch(f.name) for f in manifest.files):
            raise TaskFailed("a publication has no files or invalid file names", fatal=True)
        shared = Path(manifest.folder)
        if has_files(shared, manifest.files):
            yield shared
            return
        with atomic.temporary_folder(Path(tempfile.gettempdir()), "wfm-policy-") as folder:
            try:
                for file in manifest.files:
                    path, name = folder / file.name, manifest.offer_name(file)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as out:
                        for piece in self.client.read_file(name, file.num_bytes, PIECE_TIMEOUT_S):
                            out.write(piece.data)
            except (PipeError, OSError) as error:
                raise TaskFailed(
                    f"publication {manifest.publication} cannot be downloaded: {error}", fatal=False
                ) from error
            if not has_files(folder, manifest.files):
                raise TaskFailed(f"publication {manifest.publication} does not match its announced hashes", fatal=False)
            yield folder

    @torch.no_grad()
    def _load_weights(self, folder: Path) -> None:
        if not self.lora:
            for part in self.model.denoiser_components:
                self._copy_tensors(part, sorted((folder / part).glob("*.safetensors")))
            return
        self._load_adapter(folder)
        if self.merge:
            if self._adapter_merge is None:
                self._adapter_merge = AdapterMerge(find_adapter_layers(self.model.denoiser))
                denoiser: Any = self.model.denoiser
                denoiser.disable_adapters()
            self._adapter_merge.merge("default")

    def _load_adapter(self, folder: Path) -> None:
        if not self._has_adapter:
            load_adapter(self.model, folder / LORA_FOLDER)
            for name, parameter in self.model.denoiser.named_parameters():
                if ".lora_" in name:
                    parameter.data = parameter.data.to(self.model.dtype)  # same dtype as on the training ranks
            self._has_adapter = True
            return
        folder = folder / LORA_FOLDER
        for part in self.model.denoiser_components:
            self._copy_tensors(part, [folder / LORA_FILES[part]])
            copy_whole_layers(getattr(self.model.pipeline, part), read_whole_layers(folder, part), folder)

    def _copy_tensors(self, part: str, paths: list[Path]) -> None:
        """Copy tensors to the denoiser component `part`. Raises ValueError if the files lack a trained tensor."""
        network: Any = getattr(self.model.pipeline, part)
        targets = network.state_dict()
        if self.lora:
            names = {n: diffusers_name(n.replace(".default.", ".")) for n in targets if ".lora_" in n}
            targets = {f"{LORA_PREFIX}.{name}": targets[n] for n, name in names.items()}
        trained = {name for name in targets if not matches_any_pattern(name, self.model.unused_parameter_patterns)}
        missing = adapter_tensor_names(network) if self.lora else trained
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118, not a mapping
                    targets[name].copy_(file.get_tensor(name))
                    missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} tensors of {part} are missing, e.g. {min(missing)}")
