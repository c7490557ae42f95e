"""Session-scoped data folders. Tests must not modify them."""

import pytest


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
