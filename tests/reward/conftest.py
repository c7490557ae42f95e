"""Fixtures of the tests of rewards: `probe_rewards` in all processes, and an HTTP server with scripted answers."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from reward_http import Server

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def probes():
    """Make probe_rewards importable here and in every process that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{FOLDER}{os.pathsep}{FOLDER.parent}", prepend=os.pathsep)
        patch.syspath_prepend(FOLDER)
        yield


@pytest.fixture
def server():
    with closing(Server()) as server:
        yield server
