"""Ranks for the tests of this folder, started once and kept: importing torch, DeepSpeed and diffusers takes longer
than most of these tests."""

import pytest

from ranks import started


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    with started(1, tmp_path_factory.mktemp("one_rank")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    with started(2, tmp_path_factory.mktemp("two_ranks")) as ranks:
        yield ranks
