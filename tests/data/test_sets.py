"""Weighted mixtures of data sets: draw frequencies, ids, holdout, and rejected recipes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folders import put, sft_recipe
from wfm_ds.data.datasets import load_data
from wfm_ds.data.order import sample_index
from wfm_ds.data.samples import epoch_counts, repeat_samples
from wfm_ds.errors import DataError
from wfm_ds.recipe import file as recipe_file


@pytest.fixture
def folder(tmp_path):
    for name, count in (("cats", 30), ("dogs", 10)):
        put(tmp_path / name, {f"{i:02}.png": None for i in range(count)})
        put(tmp_path / name, {f"{i:02}.txt": f"{name} {i}" for i in range(count)})
    return tmp_path


def recipe(folder, *sets, **keys):
    data = {"kind": "sets", "path": str(folder), "sets": list(sets), "cache_dir": str(folder / "cache"), **keys}
    return sft_recipe(data, holdout=0.2)


def test_a_set_is_drawn_in_proportion_to_its_weight(folder, caplog):
    with caplog.at_level("INFO"):
        data = load_data(recipe(folder, {"path": "cats"}, {"path": "dogs", "weight": 3.0}))
    count = len(data.samples)
    of_epoch = Counter(data.samples[sample_index(i, count, 0, True)].id.partition("/")[0] for i in range(count))
    assert of_epoch["dogs"] / count == pytest.approx(0.75, abs=0.01)
    ids = [sample.id for sample in data.samples]
    assert len(set(ids)) == count
    assert ids == sorted(ids)
    shown = Counter(sample.prompt.text for sample in data.samples)
    times = {name: {n for text, n in shown.items() if text.startswith(name)} for name in ("cats", "dogs")}
    assert times["cats"] == {1}
    assert max(times["dogs"]) - min(times["dogs"]) <= 1
    held = {sample.prompt.text for sample in data.held_out}
    assert held
    assert not held & set(shown)  # held-out prompts are not in the training data
    assert len(held) + len(shown) == 40
    assert "data.sets: dogs: " in caplog.text
    assert "75% of an epoch" in caplog.text


def test_reasons_and_notes_are_those_of_the_sets(folder, caplog):
    (folder / "cats" / "bare.png").touch()
    (folder / "more").mkdir()
    (folder / "more" / "a.png").touch()
    prompt = "a photo of sks dog"
    data = load_data(recipe(folder, {"path": "cats", "name": "felines"}, {"path": "more", "prompt": prompt}))
    assert data.bad == {"no_json": [str(folder / "cats" / "bare.png")]}
    assert "more: 1 files without a caption use data.prompt" in caplog.text
    assert {sample.id.partition("/")[0] for sample in (*data.samples, *data.held_out)} == {"felines", "more"}


@given(
    sizes=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 500), min_size=1),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
)
def test_counts_follow_the_weights_and_leave_no_sample_out(sizes, weights):
    weight_of = dict(zip("abcd", weights, strict=True))
    counts = epoch_counts(sizes, weight_of)
    whole, filled = sum(counts.values()), [name for name, size in sizes.items() if size]
    assert all(counts[name] >= size for name, size in sizes.items())
    assert all(counts[name] == 0 for name, size in sizes.items() if not size)
    for name in filled:
        share = weight_of[name] / sum(weight_of[other] for other in filled)
        assert abs(counts[name] - share * whole) <= len(filled) + 1


def test_repeats_are_even_and_spread(folder):
    samples = load_data(recipe(folder, {"path": "dogs"})).samples
    found = repeat_samples(samples, 2 * len(samples) + 2)
    assert sorted(Counter(sample.media.name for sample in found).values())[-3:] == [2, 3, 3]
    assert [sample.id for sample in found if sample.id.endswith("#3")] == [
        f"{samples[0].id}#3",
        f"{samples[len(samples) // 2].id}#3",
    ]
    assert repeat_samples([], 0) == []


def test_weights_that_would_repeat_almost_everything_are_refused(folder):
    far_apart = recipe(folder, {"path": "cats", "weight": 0.001}, {"path": "dogs"})
    with pytest.raises(
        DataError, match=r"weight of cats too small: one epoch would need \d+ samples for \d+ distinct ones\. Raise the"
    ):
        load_data(far_apart)


def test_a_recipe_with_sets_is_written_and_read_back(folder, tmp_path):
    written = recipe(folder, {"path": "cats"}, {"path": "/elsewhere/dogs", "weight": 2, "kind": "paired"})
    (tmp_path / "r.yaml").write_text(recipe_file.dump_recipe(written))
    assert recipe_file.load_recipe(tmp_path / "r.yaml") == written
    assert [one.path for one, _ in written.data.set_recipes().values()] == [str(folder / "cats"), "/elsewhere/dogs"]
