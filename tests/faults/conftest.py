"""Fixtures of the tests with killed, stopped and failing processes."""

import os
from pathlib import Path

import pytest

from transport.peers import stack

__all__ = ["probes", "stack"]

PROBES = Path(__file__).parent.parent / "reward"


@pytest.fixture(scope="module")
def probes():
    """Make the rewards of tests/reward/probe_rewards.py importable in this process and its child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROBES), prepend=os.pathsep)
        patch.syspath_prepend(PROBES)
        yield
