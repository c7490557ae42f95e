"""Streamed data sets: the same rows as the full data set, resuming from any position, and equal batches on any number
of ranks."""

import itertools
import json

import numpy as np
import pytest

from folders import encode_image, sft_recipe
from wfm_ds.data.datasets import load_data
from wfm_ds.data.hf_stream import COMMIT, HfStream, StreamSource, stream_version
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe

FRAMING = Framing(height=16, width=16)
NUM_ROWS, EMPTY, BROKEN = 11, 2, 6


def recipe_of(data, **validation):
    return sft_recipe({"kind": "hf", "path": str(data), "streaming": True, "shuffle": False}, **validation)


def test_recipes_that_need_to_know_samples_before_are_refused():
    with pytest.raises(ValueError, match=r"set validation\.path to a folder, or set validation\.holdout: 0 and"):
        recipe_of("x")
    with pytest.raises(ValueError, match="cannot hold out or show training samples"):
        recipe_of("x", holdout=0)
    assert recipe_of("x", holdout=0, prompts="p.txt").data.streaming
    assert recipe_of("x", path="v").data.streaming


def test_a_data_set_of_the_hub_is_streamed_at_a_commit():
    with pytest.raises(DataError, match=r"Set data\.options to \{revision: COMMIT\}, .*datasets/owner/name/commits"):
        stream_version("owner/name", {"revision": "main"})
    assert COMMIT.fullmatch(stream_version("owner/name", {"revision": "0123456789" * 4}))


@pytest.fixture
def hf(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


@pytest.fixture
def shards(hf, tmp_path):
    """Write shards of 7 and 4 rows in row groups of 3. Row EMPTY has no caption, and the image of row BROKEN is
    invalid."""
    features = hf.Features({"image": hf.Image(), "text": hf.Value("string"), "shot": hf.Value("int64")})
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for number, rows in enumerate([range(7), range(7, NUM_ROWS)]):
        values = {
            "image": [{"bytes": b"no image" if i == BROKEN else encoded(i), "path": f"{i}.png"} for i in rows],
            "text": ["" if i == EMPTY else f"picture {i}" for i in rows],
            "shot": list(rows),
        }
        file = folder / f"train-{number:05}-of-00002.parquet"
        hf.Dataset.from_dict(values, features=features).to_parquet(file, batch_size=3)
    return folder.parent


def encoded(seed):
    return encode_image(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8))


def stream(path, **keys):
    return HfStream(DataRecipe(kind="hf", path=str(path), streaming=True, shuffle=False, **keys))


def test_rows_are_those_of_the_data_set_again_and_again(shards):
    known = build_sample_set(DataRecipe(kind="hf", path=str(shards), max_bad_fraction=0.5), [str(shards)])
    rows = stream(shards).read(25)
    assert [row.epoch for row in rows] == [0] * 10 + [1] * 10 + [2] * 5
    for row, want in zip(rows, itertools.cycle(known.samples)):
        assert (row.sample.id, row.sample.prompt) == (want.id, want.prompt)
        assert row.sample.media.open().read() == want.media.open().read()
    assert len({row.sample.media.identity() for row in rows}) == 10


@pytest.mark.parametrize("first", [0, 1, 3, 6, 9, 10, 11, 20])
def test_a_stream_resumes_from_a_stored_position(shards, first):
    whole = stream(shards)
    rows = whole.read(27)
    one, two = stream(shards), stream(shards)
    one.read(first)
    three = stream(shards)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.read(2) == rows[first : first + 2]
    three.load_state_dict(json.loads(json.dumps(two.state_dict())))
    assert three.read(25 - first) == rows[first + 2 :]
    assert three.state_dict()["rejected"] == whole.state_dict()["rejected"]


def test_a_stored_position_of_another_data_set_is_refused(shards):
    mark = stream(shards).state_dict()
    (shards / "data" / "more.txt").write_text("new")
    with pytest.raises(DataError, match=r"has changed since the checkpoint .*: restore the files or start a new run"):
        stream(shards).load_state_dict(mark)


def test_bad_rows_and_streams_without_a_good_one_end_the_run(shards, hf, monkeypatch):
    monkeypatch.setattr("wfm_ds.data.hf_stream.WINDOW", 1)
    with pytest.raises(
        DataError, match=r"1 of the first 3 rows are invalid .* Last: train/000000002 \(caption unreadable"
    ):
        stream(shards).read(5)
    features = hf.Features({"image": hf.Image(), "text": hf.Value("string")})
    rows = hf.Dataset.from_dict({"image": [{"bytes": b"x", "path": None}], "text": [""]}, features=features)
    for file in (shards / "data").iterdir():
        file.unlink()
    rows.to_parquet(shards / "data" / "train.parquet")
    with pytest.raises(DataError, match="all 1 rows of split train are invalid"):
        stream(shards, max_bad_fraction=1).read(1)
    rows.save_to_disk(shards / "saved")
    with pytest.raises(DataError, match=r"was written by save_to_disk and needs no streaming: remove data\.streaming"):
        stream(shards / "saved")


def test_what_is_shown_and_measured_is_the_folder_of_validation(shards, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.png").write_bytes(encoded(50))
    (tmp_path / "held" / "a.txt").write_text("held out")
    data = load_data(recipe_of(shards, path=str(tmp_path / "held")))
    assert (data.samples, [p.text for p in data.validation_prompts], len(data.held_out)) == ([], ["held out"], 1)
    (tmp_path / "held" / "a.txt").unlink()
    (tmp_path / "held" / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "in a table"}))
    keys = {"kind": "hf", "path": str(shards), "streaming": True, "shuffle": False, "image_column": "image"}
    for path, count in ((tmp_path / "held", 1), (shards, NUM_ROWS - 1)):  # a table without this column, and shards
        recipe = sft_recipe({**keys, "max_bad_fraction": 0.5}, path=str(path))
        assert len(load_data(recipe).held_out) == count


@pytest.fixture
def source(shards):
    made = []

    def make():
        settings = {"global_batch": 4, "seed": 3, "framing": FRAMING, "max_bad_fraction": 0.5}
        made.append(StreamSource(lambda: stream(shards), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def facts(samples):
    return [(s.position, s.epoch, s.sample_id, s.prompt.text, s.pixels.tobytes()) for s in samples]


def test_batches_are_equal_at_any_number_of_ranks_and_when_a_run_goes_on_with_another(shards, source):
    alone, pair = source(), [source(), source()]
    steps = [facts(alone.read_batch(step, 0, 1)) for step in range(1, 8)]
    assert [fact[0] for step in steps for fact in step] == list(range(28))
    usable = [row for row in stream(shards).read(28)]
    for row, fact in zip(usable, itertools.chain(*steps), strict=True):
        if row.sample.id == f"train/{BROKEN:09}":
            assert fact[2] != row.sample.id  # replaced by another row of the step
        else:
            assert fact[1:3] == (row.epoch, row.sample.id)
            assert fact[4] == load_media(row.sample.media, FRAMING, draw_centre).tobytes()
    for step in (1, 2, 3):
        assert facts(pair[0].read_batch(step, 0, 2)) + facts(pair[1].read_batch(step, 1, 2)) == steps[step - 1]
    states = json.loads(json.dumps([one.state() for one in pair]))
    assert states[0]["stream"] == states[1]["stream"]
    later = source()
    later.restore_from_ranks(states, 0, 1)
    assert [facts(later.read_batch(step, 0, 1)) for step in (4, 5, 6, 7)] == steps[3:]
    assert later.bad_counts(dict) == alone.bad_counts(dict)
    assert later.bad_counts(dict)["data/bad/no_prompt"] > 1
    with pytest.raises(ValueError, match="step by step: the next step is 8, not 5"):
        later.read_batch(5, 0, 1)
