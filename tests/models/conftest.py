"""Tiny models that tests of families share."""

import pytest
import torch

from wfm_ds.models import registry


@pytest.fixture(scope="module")
def load(tiny_pipelines):
    """One float32 model per folder for the tests that change nothing."""
    loaded = {}

    def get(family):
        if family not in loaded:
            loaded[family] = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu")
        return loaded[family]

    return get
