"""Result of checking a recipe, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wfm_ds.recipe.derived import Derived
from wfm_ds.run.estimate import Estimate, memory_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of a successful check."""

    facts: Mapping[str, str]
    derived: Derived
    memory: Estimate
    of: str = "denoiser"  # the trained network
    verdict: str  # whether the memory suffices

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"{name:27}{fact}" for name, fact in self.facts.items()),
                *self.derived.lines(),
                *memory_lines(self.memory, of=self.of),
                self.verdict,
                "all checks passed",
            ]
        )

    def numbers(self) -> dict[str, Any]:
        """Return the report as a JSON object, with sizes in bytes and the memory per rank by phase and part."""
        phases = {phase: dict(parts) for phase, parts in self.memory.phases.items()}
        return {
            "facts": dict(self.facts),
            "derived": asdict(self.derived),
            "parameters": {"all": self.memory.total, "trained": self.memory.trained},
            "memory": {"peak": self.memory.peak, "peak_phase": self.memory.peak_phase, "phases": phases},
            "checkpoint_bytes": self.memory.checkpoint_bytes,
            "export_bytes": self.memory.export_bytes,
            "verdict": self.verdict.strip(),
        }
