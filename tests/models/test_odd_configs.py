"""Values of the wrong type in a pipeline's JSON files give a one-line ModelError, whatever the libraries raise."""

import json
import random
import shutil

import pytest
import torch

from each_case import check_each
from wfm_ds.errors import ModelError
from wfm_ds.models import registry

pytestmark = pytest.mark.slow

ODD = [None, True, -1, 0, 1.5, "x", "", [], {}, [[1]], {"a": 1}, 10**30]
FILES = ["model_index.json", "transformer/config.json", "vae/config.json", "text_encoder/config.json", "call.json"]
FILES += ["scheduler/scheduler_config.json"]


def load_with(folder, file, changes):
    """Load the pipeline with `file` changed, then restore the file. Return the error message or None."""
    before = (folder / file).read_text()
    (folder / file).write_text(json.dumps(changes(json.loads(before))))
    try:
        registry.load_model(folder, dtype=torch.float32, device="cpu")
    except ModelError as error:
        return str(error)
    finally:
        (folder / file).write_text(before)
    return None


@pytest.fixture
def folder(tiny_pipelines, tmp_path):
    """Return a writable copy of the tiny pipeline."""
    return shutil.copytree(tiny_pipelines("sd3"), tmp_path / "pipeline")


def mutated(rng, values):
    key = rng.choice(sorted(values))
    return {**values, key: rng.choice(ODD)}


def test_an_odd_value_loads_or_is_a_one_line_error(folder):
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        said = load_with(folder, rng.choice(FILES), lambda values, rng=rng: mutated(rng, values))
        if said is not None:
            refused += 1
            assert "\n" not in said, seed
            assert str(folder) in said, seed
    assert refused > 10


@check_each(
    ("file", "key", "value"),
    [
        ("model_index.json", "_class_name", ["x"]),
        ("model_index.json", "transformer", [1, 2]),
        ("transformer/config.json", "num_attention_heads", "two"),
        ("transformer/config.json", "patch_size", 0),
        ("transformer/config.json", "num_layers", {}),
        ("vae/config.json", "latent_channels", None),
    ],
)
def test_a_wrong_type_is_a_one_line_error(folder, file, key, value):
    said = load_with(folder, file, lambda values: {**values, key: value})
    assert said is not None
    assert str(folder) in said
    assert "\n" not in said
