"""How runs are compared whose ranks shared out the same work differently."""

import json

import pytest
from safetensors.torch import load_file

RELATIVE = 1e-4
# Pictures are rounded to 8 bits before they are scored: where a batch is cut elsewhere, a value may round the other way
# and move a reward by 1 / (255 * H * W), and an advantage by that over the group's deviation.
PICTURES_RELATIVE, PICTURES_ABSOLUTE = 5e-3, 5e-4
# AdamW divides by the gradient's size: an advantage moved so moves weights by a share of the learning rate, 3e-2 there.
PICTURES_WEIGHTS = 2e-3


def records(folder):
    """Metrics by line, without times and speeds, without what counts one rank's own micro-batches, and without what
    only runs with rollout workers have."""
    own = ("time", "perf/", "rollout/staleness", "rollout/dropped_stale", "rollout/workers")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(own) and "seconds" not in k} for line in lines]


def exported(folder):
    """Every tensor of the denoiser in the last export, by file and name."""
    last = max((folder / "safetensors").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    files = [f for f in last.rglob("*.safetensors") if f.parent.name.startswith(("lora", "transformer"))]
    return {f"{f.relative_to(last)} {name}": tensor for f in files for name, tensor in load_file(f).items()}


def assert_same_runs(one, two):
    """Metrics and exported weights of two runs agree but for rounding errors; rewards, if any, scored pictures."""
    lines = records(one)
    pictures = any(tag.startswith("reward/") for line in lines for tag in line)
    relative, absolute = (PICTURES_RELATIVE, PICTURES_ABSOLUTE) if pictures else (RELATIVE, 1e-5)
    for expected, got in zip(lines, records(two), strict=True):
        assert got == pytest.approx(expected, rel=relative, abs=absolute)
    expected, got = exported(one), exported(two)
    assert got.keys() >= expected.keys()  # a run that was stopped on its way exported there too
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= (PICTURES_WEIGHTS if pictures else 1e-5), name
