"""Report of a successful recipe check, printed as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.memory.estimate import MemoryEstimate, format_memory_table
from wfm_ds.recipe.run_sizes import RunSizes
from wfm_ds.runs.output_folder import RunStart


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    facts: Mapping[str, str]
    run_sizes: RunSizes
    memory: MemoryEstimate | None
    """Estimated memory. None for a model family whose code cannot run without weights."""
    trained_part: str = "denoiser"  # name of the trained network
    verdict: str  # whether the memory suffices

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"{name:27}{fact}" for name, fact in self.facts.items()),
                *self.run_sizes.summary_lines(),
                *(format_memory_table(self.memory, trained_part=self.trained_part) if self.memory else ()),
                self.verdict,
                "all checks passed",
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Sizes are in bytes.

        `memory.phases` is {phase: {category: bytes}} for one rank. Parameter counts and sizes are omitted if memory was
        not estimated.
        """
        report = {"facts": dict(self.facts), "derived": asdict(self.run_sizes), "verdict": self.verdict.strip()}
        if self.memory is None:
            return report
        phases = {phase: dict(parts) for phase, parts in self.memory.phases.items()}
        return report | {
            "parameters": {"all": self.memory.num_parameters, "trained": self.memory.num_trained},
            "memory": {"peak": self.memory.peak_bytes, "peak_phase": self.memory.peak_phase, "phases": phases},
            "checkpoint_bytes": self.memory.checkpoint_bytes,
            "export_bytes": self.memory.export_bytes,
        }


def gpu_memory() -> int | None:
    """Return the memory of the first GPU in bytes, or None if there is no GPU."""
    return torch.cuda.get_device_properties(0).total_memory if uses_cuda() else None


def start_summary(start: RunStart) -> str:
    """Return a text for `--check` that says whether the run is new, resumes from a checkpoint, or has finished."""
    if start.is_finished:
        return f"finished run (step {start.step}): nothing to do"
    return f"continues after step {start.step} from {start.checkpoint}" if start.checkpoint else "a new run"
