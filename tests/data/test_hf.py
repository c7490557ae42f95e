"""Hugging Face data sets: saved to disk, as parquet, as image folders, and as the other ranks receive them."""

import numpy as np
import pytest

from folders import encode_image
from wfm_ds.data.folder import load_folder
from wfm_ds.data.folder_layout import detect_layout
from wfm_ds.data.hf_dataset import HfColumn, row_media
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.data.samples import LocalFile
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe

hf = pytest.importorskip("datasets")


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def encoded(seed, kind="PNG"):
    return encode_image(picture(seed), kind)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def rows():
    images = [{"bytes": encoded(i), "path": None if i % 2 else f"{i}.png"} for i in range(6)]
    features = hf.Features({"image": hf.Image(), "text": hf.Value("string"), "shot": hf.Value("int64")})
    values = {"image": images, "text": [f" picture {i}\n" for i in range(6)], "shot": list(range(6))}
    return hf.Dataset.from_dict(values, features=features)


def scan(path, **keys):
    return build_sample_set(DataRecipe(kind="hf", path=str(path), **keys), [str(path)])


def pixels(sample):
    return load_media(sample.media, Framing(height=16, width=16), draw_centre)


@pytest.mark.parametrize("how", ["saved", "splits", "parquet"])
def test_rows_are_samples_with_their_pixels_bit_for_bit(tmp_path, rows, how):
    path = tmp_path / "set"
    if how == "saved":
        rows.save_to_disk(path, num_shards=2)
    elif how == "splits":
        hf.DatasetDict({"train": rows, "test": rows.select(range(1))}).save_to_disk(path)
    else:
        (path / "data").mkdir(parents=True)
        rows.to_parquet(path / "data" / "train-00000-of-00001.parquet")
    found = scan(path)
    assert [sample.id for sample in found.samples] == [f"train/{i:09}" for i in range(6)]
    assert [sample.prompt.text for sample in found.samples] == [f"picture {i}" for i in range(6)]
    assert [sample.prompt.metadata for sample in found.samples] == [{"shot": i} for i in range(6)]
    for i, sample in enumerate(found.samples):
        np.testing.assert_array_equal(pixels(sample), picture(i))
        assert sample.media.suffix == ".png"
    assert len({sample.media.identity() for sample in found.samples}) == 6
    if how != "splits":
        assert detect_layout(path).kind == "hf"
        assert load_folder(DataRecipe(kind="folder", path=str(path)), path).samples == found.samples
    else:
        assert len(scan(path, split="test").samples) == 1
        with pytest.raises(DataError, match=r"has the splits train, test: set data\.split to one of them"):
            scan(path, split="val")


def test_a_shuffled_data_set_keeps_pixels_and_captions_together(tmp_path, rows):
    rows.shuffle(seed=1).save_to_disk(tmp_path / "set")
    for sample in scan(tmp_path / "set").samples:
        np.testing.assert_array_equal(pixels(sample), picture(sample.prompt.metadata["shot"]))


def test_images_that_are_files_and_rows_without_one(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encoded(1, "JPEG"))
    features = hf.Features({"image": hf.Image(), "prompt": hf.Value("string")})
    rows = {"image": [str(tmp_path / "a.jpg"), None], "prompt": ["a", "b"]}
    hf.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    found = scan(tmp_path / "set", max_bad_fraction=0.9)
    (sample,) = found.samples
    assert (sample.media.suffix, sample.prompt.text) == (".jpg", "a")
    assert sample.media.open().read() == (tmp_path / "a.jpg").read_bytes()
    assert found.bad == {"no_media": [f"{tmp_path / 'set'} train/000000001"]}
    source = HfColumn(("x.arrow",), "image")  # arrow files may also contain paths
    assert row_media(source, 0, str(tmp_path / "a.jpg"), True, ".png") == LocalFile(str(tmp_path / "a.jpg"))
    assert row_media(source, 0, str(tmp_path / "gone.jpg"), True, ".png") is None


def test_columns_are_named_where_they_cannot_be_told(tmp_path, rows):
    two = rows.add_column("mask", [{"bytes": encoded(9), "path": None}] * 6).cast_column("mask", hf.Image())
    two.rename_column("text", "long").save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=r"images or videos are in image, mask; set data\.image_column to the one"):
        scan(tmp_path / "set")
    with pytest.raises(
        DataError,
        match=r"has the columns image, long, shot, mask, but not text, prompt or caption; set data\.caption_column",
    ):
        scan(tmp_path / "set", image_column="mask")
    with pytest.raises(DataError, match=r"images or videos are in image, mask, not in data.image_column shot"):
        scan(tmp_path / "set", image_column="shot")
    found = scan(tmp_path / "set", image_column="mask", caption_column="long")
    np.testing.assert_array_equal(pixels(found.samples[0]), picture(9))
    rows.remove_columns("image").save_to_disk(tmp_path / "bare")
    with pytest.raises(DataError, match="no column holds images or videos"):
        scan(tmp_path / "bare")


def test_what_cannot_be_loaded_is_one_sentence(tmp_path):
    with pytest.raises(DataError) as raised:
        scan("nobody/nothing")
    message = str(raised.value)
    assert message.startswith("nobody/nothing cannot be loaded by the `datasets` library (")
    assert "hf download --repo-type dataset nobody/nothing (see docs/data.md)" in message
    assert "\n" not in message
    with pytest.raises(DataError, match="cannot be loaded"):
        scan("nobody/nothing", options={"no_such_option": 1})
