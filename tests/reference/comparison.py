"""Comparison of a run with its reference."""

import pytest
import torch

from reference.product import read_policies, read_updates

# Measured error of float32 against float64: 2e-7 for SFT metrics, 1e-4 of the largest change for weights. In RL,
# rounding to 8 bits changes rewards by up to 1e-5.
RELATIVE, ABSOLUTE = 3e-5, 1e-5
FRACTION = 5e-4


def assert_same_metrics(lines, expected, *, absolute=ABSOLUTE):
    """Check every metric of the reference against the run, update by update."""
    assert len(lines) == len(expected)
    for number, (line, want) in enumerate(zip(lines, expected, strict=True), 1):
        got = {name: line.get(name) for name in want}
        assert got == pytest.approx(want, rel=RELATIVE, abs=absolute), f"update {number}"


def assert_same_weights(tensors, expected, start, *, where, fraction=FRACTION):
    """Check that weights differ by at most this fraction of the largest change during training.

    tensors: weights of the run. expected: weights of the reference. start: weights before training. All by name.
    """
    missing = expected.keys() - tensors.keys()
    assert not missing, f"{where}: {sorted(missing)[:3]}"
    moved = max((expected[name] - start[name]).abs().max() for name in expected)
    assert moved > 0
    worst = max((tensors[name].double() - expected[name]).abs().max() for name in expected)
    assert worst <= fraction * moved, f"{where}: {worst:.1e} of {moved:.1e}"


def assert_same_run(folder, network, optimization, expected, policies, *, absolute=ABSOLUTE, fraction=FRACTION):
    """Check the metrics and the weights of these policies against the reference."""
    assert_same_metrics(read_updates(folder), expected, absolute=absolute)
    kept = read_policies(folder)
    start = network.named_weights(optimization.policies["ref"])  # never changed
    for policy in policies:
        want = network.named_weights(optimization.weights(policy))
        assert_same_weights(kept[policy], want, start, fraction=fraction, where=policy)


def assert_no_equal_policies(optimization, *names):
    """Check that the policy copies differ, so that comparing with a wrong copy would fail."""
    weights = [torch.cat([p.flatten() for p in optimization.weights(name)]) for name in names]
    for i, one in enumerate(weights):
        assert all((one - other).abs().max() > 1e-5 for other in weights[i + 1 :])
