"""Weights that others wrote, as an export asks for them: LoRA folders of Cosmos-RL, and DeepSpeed's own checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wfm_ds.checkpoint.export import LORA_FILES, LORA_FOLDER, LORA_PREFIX
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.engine.engine import persistent_buffers
from wfm_ds.errors import ModelError, UserError, is_out_of_memory
from wfm_ds.models.loading import read_json

ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIXES = ("base_model.model.", f"{LORA_PREFIX}.")
WRAPPERS = ("module.", "transformer.")  # what training frameworks put before a denoiser's own names
# What reading a pickle raises when it is damaged, or of classes that are not here.
PICKLE_ERRORS = (OSError, ValueError, RuntimeError, KeyError, EOFError, ImportError, AttributeError, TypeError)


def lora_folder(folder: Path) -> Path | None:
    """The folder with a LoRA's file and its config: this one, or `lora` in it. None: there is none."""
    for candidate in (folder, folder / LORA_FOLDER):
        if (candidate / LORA_FILES[LORA_PREFIX]).is_file() and (candidate / ADAPTER_CONFIG).is_file():
            return candidate
    return None


class LoraFolder:
    """The LoRA files of one or two experts, in PEFT's names, with or without the prefixes that PEFT and diffusers put
    before them."""

    lora = True

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the files cannot be read, or its config does not say rank and alpha."""
        self.folder, config = folder, read_json(folder / ADAPTER_CONFIG)
        known = {f for f in peft.LoraConfig.__dataclass_fields__ if f in config}
        if lacking := [name for name in ("r", "lora_alpha") if name not in known]:
            raise ModelError(f"{folder / ADAPTER_CONFIG} does not say {' and '.join(lacking)}; copy the LoRA again")
        self.settings = {name: config[name] for name in known}
        self.parts = tuple(part for part, file in LORA_FILES.items() if (folder / file).is_file())

    @property
    def base(self) -> str | None:
        """The model that it says it is for."""
        return self.settings.get("base_model_name_or_path")

    def lora_config(self) -> Any:
        return peft.LoraConfig(**self.settings)

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            for name, tensor in self.tensors(part):
                yield name if len(self.parts) == 1 else f"{part}.{name}", tensor

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """The adapter of one part of the denoiser. Raises ModelError if its file cannot be read."""
        file = self.folder / LORA_FILES[part]
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read ({error}); copy the LoRA again") from error
        for name, tensor in tensors.items():
            for prefix in (*PEFT_PREFIXES, f"{part}."):
                name = name.removeprefix(prefix)
            yield name.replace(".default.", "."), tensor


def is_deepspeed(folder: Path) -> bool:
    """Return whether DeepSpeed saved something here, or in the folder that its file `latest` names."""
    return (folder / "latest").is_file() or any(folder.glob("*_optim_states.pt"))


class DeepSpeedWeights:
    """The float32 weights in a checkpoint that DeepSpeed's own save_checkpoint wrote, at any ZeRO stage."""

    lora = False

    def __init__(self, folder: Path, target: ExportTarget) -> None:
        """Read everything into memory: its files are pickles, and can run code. Raises UserError if that fails."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        root, tag = (folder, None) if (folder / "latest").is_file() else (folder.parent, folder.name)
        try:
            states = get_fp32_state_dict_from_zero_checkpoint(str(root), tag=tag)
        except PICKLE_ERRORS as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{folder} cannot be read as a DeepSpeed checkpoint ({reason})") from error
        self.target, self.states = target, own_names(states)

    def lora_config(self) -> None:
        return None

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors; buffers that it leaves out are the base folder's."""
        (part,) = self.target.parts
        yield from self.states.items()
        stored = self.target.stored(part)
        for name, _ in persistent_buffers(self.target.bare(part)):
            if name not in self.states:
                yield name, stored.tensor(name)


def own_names(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the prefixes that all of them have."""
    found = dict(states)
    for prefix in WRAPPERS:
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found
