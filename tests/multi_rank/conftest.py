"""Session-scoped data folders, which tests must not modify, and whole runs of tiny recipes."""

import pytest

from multi_rank.resuming import COLORS, tiny_recipe, train_on_rank


def write_images(folder, broken=()):
    from wfm_ds.demos.digits_data import write_digits

    write_digits(folder)
    for name in broken:
        (folder / "images" / f"{name}.png").write_bytes(b"not a picture")
    return folder / "images"


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder of captioned images. Its parent folder also holds pairs.jsonl."""
    return write_images(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def broken_digits(tmp_path_factory):
    """The same data with three corrupt images."""
    return write_images(tmp_path_factory.mktemp("broken_digits"), ("0003", "0200", "0650"))


@pytest.fixture
def train_tiny(one_rank, two_ranks, tiny_pipelines, tmp_path):
    """Return a function that trains a tiny recipe on one or two ranks into tmp_path/where. It returns this folder.

    function: what each rank runs, with `options`.
    """

    def train(where, name, *overrides, ranks=1, family="sd3", data=COLORS, function=train_on_rank, **options):
        recipe = tiny_recipe(name, tmp_path / where, tiny_pipelines(family), *overrides, data=data)
        {1: one_rank, 2: two_ranks}[ranks].run(function, **recipe, **options)
        return tmp_path / where

    return train
