"""A rollout worker's copy of the published policy: found on a shared path or fetched, checked, and put on the model."""

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

from wfm_ds.checkpoint.adapter import load_adapter, load_saved, placed_names
from wfm_ds.checkpoint.export import LORA_FILES, LORA_FOLDER, LORA_PREFIX, SAVED_FILES, diffusers_name
from wfm_ds.engine.flops import adapted_layers
from wfm_ds.engine.merging import AdapterMerge
from wfm_ds.errors import UserError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.base import matches as is_named
from wfm_ds.pipes.client import PipeClient
from wfm_ds.pipes.sockets import PipeError
from wfm_ds.pipes.wire import WireError
from wfm_ds.pipes.worker import TaskFailed
from wfm_ds.rollout.publisher import Manifest, PolicyFile, matches

log = logging.getLogger(__name__)

PIECE_S = 60.0  # for one piece of a file to arrive
NAME = re.compile(r"[\w-]+/[\w.-]+")  # of a file: one folder deep, nowhere else


class PolicyWeights:
    """The model's denoiser with the weights of one publication. For one thread at a time."""

    def __init__(self, model: DiffusionModel, client: PipeClient, *, lora: bool, merge: bool = False) -> None:
        """`client`: attached to the trainer's hub. merge: have the adapter in the weights (engine/merging.py)."""
        self.model, self.client, self.lora, self.merge = model, client, lora, merge
        self.loaded: Manifest | None = None
        self._adapted = False
        self._merged: AdapterMerge | None = None

    def use(self, manifest: Manifest) -> int:
        """Have at least this publication on the model, and return which one it is: the newest known of its life.

        Raises TaskFailed, not for good, if it cannot be had: the weights are those of before then, or none.
        """
        held = self.loaded
        if held is not None and held.life == manifest.life and held.publication >= manifest.publication:
            return held.publication
        with self._found(manifest) as folder:
            self.loaded = None  # until all of it is on the model
            try:
                self._load(folder)
            except (UserError, OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
                raise TaskFailed(
                    f"publication {manifest.publication} cannot be loaded: {error}", fatal=False
                ) from error
        self.loaded = manifest
        log.info("uses publication %d", manifest.publication)
        return manifest.publication

    @contextlib.contextmanager
    def _found(self, manifest: Manifest) -> Iterator[Path]:
        """A folder with exactly the bytes that were announced; what is fetched for it goes again."""
        if not manifest.files or not all(NAME.fullmatch(f.name) for f in manifest.files):
            raise TaskFailed("a publication names no files, or strange ones", fatal=True)
        shared = Path(manifest.folder)
        if matches(shared, manifest.files):
            yield shared
            return
        with tempfile.TemporaryDirectory(prefix="wfm-policy-") as temporary:
            folder = Path(temporary)
            try:
                for file in manifest.files:
                    self._fetch(manifest, file, folder / file.name)
            except (PipeError, WireError, OSError) as error:
                raise TaskFailed(
                    f"publication {manifest.publication} cannot be fetched: {error}", fatal=False
                ) from error
            if not matches(folder, manifest.files):
                raise TaskFailed(f"publication {manifest.publication} does not have the announced digests", fatal=False)
            yield folder

    def _fetch(self, manifest: Manifest, file: PolicyFile, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            for piece in self.client.read_file(manifest.offered(file), file.num_bytes, PIECE_S):
                out.write(piece.data)

    @torch.no_grad()
    def _load(self, folder: Path) -> None:
        if not self.lora:
            for part in self.model.denoiser_parts:
                self._copy(part, sorted((folder / part).glob("*.safetensors")))
            return
        self._load_adapter(folder)
        if self.merge:
            if self._merged is None:
                self._merged = AdapterMerge(adapted_layers(self.model.denoiser))
                denoiser: Any = self.model.denoiser
                denoiser.disable_adapters()
            self._merged.put_in("default")

    def _load_adapter(self, folder: Path) -> None:
        if not self._adapted:
            load_adapter(self.model, folder / LORA_FOLDER)
            for name, parameter in self.model.denoiser.named_parameters():
                if ".lora_" in name:
                    parameter.data = parameter.data.to(self.model.dtype)  # as the training ranks compute
            self._adapted = True
            return
        for part in self.model.denoiser_parts:
            self._copy(part, [folder / LORA_FOLDER / LORA_FILES[part]])
            load_saved(getattr(self.model.pipeline, part), folder / LORA_FOLDER / SAVED_FILES[part])

    def _copy(self, part: str, paths: list[Path]) -> None:
        """Write the tensors of these files into a part of the denoiser. Raises ValueError unless they are all that
        trains of it."""
        network: Any = getattr(self.model.pipeline, part)
        places = network.state_dict()
        if self.lora:
            names = {n: diffusers_name(n.replace(".default.", ".")) for n in places if ".lora_" in n}
            places = {f"{LORA_PREFIX}.{name}": places[n] for n, name in names.items()}
        # What full training leaves alone is no part of a publication: it is the base's, which is on the model.
        missing = placed_names(network) if self.lora else {n for n in places if not is_named(n, self.model.frozen)}
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118, it is no mapping
                    places[name].copy_(file.get_tensor(name))
                    missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} tensors of {part} are missing, e.g. {min(missing)}")
