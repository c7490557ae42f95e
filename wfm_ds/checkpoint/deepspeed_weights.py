"""Checkpoints written by DeepSpeed itself, as a tensor source for exports. For LoRA files see lora_file.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from wfm_ds.engine.engine import persistent_buffers
from wfm_ds.errors import UserError, is_out_of_memory
from wfm_ds.export.target import ExportTarget

WRAPPERS = ("module.", "transformer.")  # prefixes that training frameworks add to the denoiser's parameter names
# Raised when a pickle is damaged or needs classes that are not installed.
PICKLE_ERRORS = (OSError, ValueError, RuntimeError, KeyError, EOFError, ImportError, AttributeError, TypeError)


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Return whether this folder, or the folder named in its file `latest`, is a checkpoint saved by DeepSpeed."""
    return (folder / "latest").is_file() or any(folder.glob("*_optim_states.pt"))


class DeepSpeedWeights:
    """Float32 weights in a checkpoint written by DeepSpeed's save_checkpoint, at any ZeRO stage."""

    uses_lora = False

    def __init__(self, folder: Path, target: ExportTarget) -> None:
        """Read the checkpoint into memory. Its pickles can execute code. Raises UserError if reading fails."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        root, tag = (folder, None) if (folder / "latest").is_file() else (folder.parent, folder.name)
        try:
            states = get_fp32_state_dict_from_zero_checkpoint(str(root), tag=tag)
        except PICKLE_ERRORS as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{folder} cannot be read as a DeepSpeed checkpoint ({reason})") from error
        self.target, self.states = target, strip_wrapper_prefixes(states)

    def lora_config(self) -> None:
        return None

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors, then the buffers that it lacks from the base model's folder."""
        (part,) = self.target.parts
        yield from self.states.items()
        stored = self.target.base_weights(part)
        for name, _ in persistent_buffers(self.target.meta_network(part)):
            if name not in self.states:
                yield name, stored.read_tensor(name)


def strip_wrapper_prefixes(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefixes in WRAPPERS that all of their names share."""
    tensors = dict(states)
    for prefix in WRAPPERS:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
