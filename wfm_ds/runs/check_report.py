"""Report of a successful recipe check, printed as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wfm_ds.memory.estimate import MemoryEstimate, format_memory_table
from wfm_ds.recipe.run_sizes import RunSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of a successful `--check` of a recipe."""

    facts: Mapping[str, str]
    run_sizes: RunSizes
    memory: MemoryEstimate
    trained_part: str = "denoiser"  # name of the trained network
    verdict: str  # whether the memory suffices

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"{name:27}{fact}" for name, fact in self.facts.items()),
                *self.run_sizes.summary_lines(),
                *format_memory_table(self.memory, trained_part=self.trained_part),
                self.verdict,
                "all checks passed",
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Sizes are in bytes.

        `memory.phases` is {phase: {category: bytes}} for one rank.
        """
        phases = {phase: dict(parts) for phase, parts in self.memory.phases.items()}
        return {
            "facts": dict(self.facts),
            "derived": asdict(self.run_sizes),
            "parameters": {"all": self.memory.num_parameters, "trained": self.memory.num_trained},
            "memory": {"peak": self.memory.peak_bytes, "peak_phase": self.memory.peak_phase, "phases": phases},
            "checkpoint_bytes": self.memory.checkpoint_bytes,
            "export_bytes": self.memory.export_bytes,
            "verdict": self.verdict.strip(),
        }
