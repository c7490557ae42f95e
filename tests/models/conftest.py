"""Tiny models shared by the family tests."""

import pytest

from families import load_tiny, small_sources


@pytest.fixture(scope="session", autouse=True)
def resize_sources_to_small_images():
    with small_sources():
        yield


@pytest.fixture(scope="session")
def load(tiny_pipelines):
    """Return `load(family)`, which gives a float32 model shared by all tests that do not modify it."""
    loaded = {}

    def get(family):
        if family not in loaded:
            loaded[family] = load_tiny(tiny_pipelines(family), family)
        return loaded[family]

    return get
