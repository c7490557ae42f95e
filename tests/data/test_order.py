"""Sample order: a pure function of the position. Batches do not depend on the number of ranks or on broken files."""

import dataclasses
import itertools
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clips import index_of, write_clip
from wfm_ds.data import batch_reader
from wfm_ds.data.batch_reader import MAX_SUBSTITUTES, candidate_offsets
from wfm_ds.data.buckets import Buckets
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.order import BatchSource, sample_index
from wfm_ds.data.pixels import BAD_MEDIA_REASONS, Framing
from wfm_ds.data.samples import LocalFile
from wfm_ds.errors import DataError
from wfm_ds.seeds import derive_seed


@given(num_samples=st.integers(1, 50), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_every_epoch_shows_every_sample_once(num_samples, seed, epoch):
    positions = range(epoch * num_samples, (epoch + 1) * num_samples)
    for shuffle in (True, False):
        shown = [sample_index(p, num_samples, seed, shuffle) for p in positions]
        assert sorted(shown) == list(range(num_samples))
        assert shuffle or shown == list(range(num_samples))


def test_epochs_and_seeds_have_their_own_order():
    orders = {tuple(sample_index(e * 40 + i, 40, seed, True) for i in range(40)) for e in range(5) for seed in range(5)}
    assert len(orders) == 25


FROZEN = [1, 5, 3, 2, 6, 0, 7, 9, 8, 4, 5, 0, 2, 1, 7, 8, 9, 6, 3, 4]  # seed 0, ten samples, two epochs


def test_the_order_does_not_change():
    """A change in numpy or Python that alters this order would break every resumed run."""
    assert [sample_index(p, 10, 0, True) for p in range(20)] == FROZEN


def test_all_orders_of_three_are_equally_likely():
    counts = {}
    for epoch in range(6000):
        key = tuple(sample_index(epoch * 3 + i, 3, 7, True) for i in range(3))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 20.5  # chi-square, 5 degrees of freedom, p = .001


def test_substitutes_are_half_an_epoch_away_and_wrap():
    assert candidate_offsets(0, 100) == [0, *range(50, 60)]
    assert candidate_offsets(98, 99) == [98, *(range(49, 59))]
    assert candidate_offsets(0, 1) == [0] * (MAX_SUBSTITUTES + 1)


SQUARE = Framing(height=8, width=8)


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes n samples; sample i has gray level i, and files in `broken` are truncated."""

    def make(count, broken=()):
        for i in range(count):
            Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / f"{i:03}.png")
            (tmp_path / f"{i:03}.json").write_text(json.dumps({"prompt": f"grey {i}"}))
        for i in broken:
            path = tmp_path / f"{i:03}.png"
            path.write_bytes(path.read_bytes()[:40])
        return CaptionedFolder(tmp_path, max_bad_fraction=0.05).samples

    return make


@pytest.fixture
def source():
    """Return a factory of BatchSources; they are closed after the test."""
    made = []

    def make(samples, **settings):
        defaults = {"global_batch": 12, "seed": 3, "shuffle": True, "max_bad_fraction": 0.05, "framings": [SQUARE]}
        made.append(BatchSource(samples, **defaults | settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def shown(images):
    return [
        (im.sample_id, im.epoch, im.position, im.prompt.text, im.pixels.shape, int(im.pixels[0, 0, 0])) for im in images
    ]


def test_a_batch_is_its_positions_in_order(folder, source):
    samples = folder(20)
    images = source(samples).read_batch(3, rank=0, world_size=1)
    for position, image in zip(range(24, 36), images, strict=True):
        index = sample_index(position, 20, 3, True)
        assert (image.position, image.epoch) == (position, position // 20)
        assert (image.sample_id, image.prompt.text) == (f"{index:03}", f"grey {index}")
        assert image.pixels.shape == (8, 8, 3)
        assert (image.pixels == index).all()


SIZE_OF = [(8, 8), (8, 16), (16, 8)]


@pytest.fixture
def mixed(tmp_path, source):
    """Write 25 images in three shapes; image i has gray level i. Return a factory of sources, and the buckets."""
    buckets = [derive_seed(0, "shape", i) % 3 for i in range(25)]
    for i, bucket in enumerate(buckets):
        height, width = SIZE_OF[bucket]
        Image.new("RGB", (3 * width, 3 * height), (i, i, i)).save(tmp_path / f"{i:02}.png")
        (tmp_path / f"{i:02}.json").write_text(json.dumps({"prompt": f"grey {i}"}))

    def make(**settings):
        samples, framings = CaptionedFolder(tmp_path, max_bad_fraction=0.0).samples, Buckets(SQUARE, SIZE_OF)
        chosen = [framings.choose_bucket(sample.media) for sample in samples]
        defaults = {"max_bad_fraction": 0.5, "framings": framings.framings, "buckets": chosen, "unit": 3}
        return source(samples, **defaults | settings)

    return make, buckets, tmp_path


@pytest.mark.parametrize("broken", [(), (4, 5, 11)])
def test_any_ranks_and_workers_train_the_same_and_each_unit_has_one_shape(mixed, broken):
    source, buckets, folder = mixed
    steady = source()
    for i in broken:
        path = folder / f"{i:02}.png"
        path.write_bytes(path.read_bytes()[:42])  # the header is intact, the pixels are truncated
    assert source().order.buckets.tolist() == buckets == steady.order.buckets.tolist()
    ranks = {world: [source(workers=1 + rank % 2) for rank in range(world)] for world in (2, 4)}
    for step in (1, 2, 3, 9, 2):
        images = steady.read_batch(step, 0, 1)
        for k in range(0, 12, 3):
            assert len({im.pixels.shape for im in images[k : k + 3]}) == 1
        for im in images:
            height, width, _ = im.pixels.shape
            assert SIZE_OF[buckets[int(im.sample_id)]] == (height, width) == (im.framing.height, im.framing.width)
            assert (im.pixels == int(im.sample_id)).all()
            assert int(im.sample_id) not in broken
        for world, of_ranks in ranks.items():
            parts = [shown(of_ranks[rank].read_batch(step, rank, world)) for rank in range(world)]
            assert list(itertools.chain(*parts)) == shown(images)
        assert shown(source().read_batch(step, 0, 1)) == shown(images)  # as after a resume at this step
    assert bool(steady.bad["decode"]) == bool(broken)


def test_units_must_fill_a_global_batch(mixed):
    source, _, _ = mixed
    with pytest.raises(ValueError, match="a global batch of 12 samples cannot be split into units of 5"):
        source(unit=5)


def test_cached_latents_are_selected_by_size(mixed):
    source, buckets, _ = mixed
    asked = []

    def cached(media, framing):
        asked.append((int(media.path.stem), (framing.height, framing.width)))
        return np.zeros(1)

    images = source(cached_latents=cached).read_batch(1, 0, 1)
    assert {im.pixels for im in images} == {None}
    assert len(asked) >= 12
    assert all(size == SIZE_OF[buckets[index]] for index, size in asked)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Write six landscape videos of 24 frames; the fourth has only eight frames."""
    folder = tmp_path_factory.mktemp("videos")
    for i in range(6):
        write_clip(folder / f"{i}.mp4", count=8 if i == 3 else 24, size=(16, 32))
        (folder / f"{i}.json").write_text(json.dumps({"prompt": f"clip {i}"}))
    return CaptionedFolder(folder, max_bad_fraction=0.0).samples


def test_clips_do_not_depend_on_ranks_workers_or_where_a_run_resumes(videos, source):
    framing = Framing(height=16, width=16, num_frames=9, fps=12, crop="random")
    settings = {"framings": [framing], "max_bad_fraction": 0.5, "global_batch": 4}
    steady = source(videos, **settings, workers=3)
    whole = {step: steady.read_batch(step, 0, 1) for step in range(1, 5)}
    for step in (4, 2):
        parts = [source(videos, **settings, workers=1).read_batch(step, rank, 2) for rank in range(2)]
        for ours, theirs in zip(itertools.chain(*parts), whole[step], strict=True):
            assert (ours.sample_id, ours.position) == (theirs.sample_id, theirs.position)
            np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    assert {im.sample_id for batch in whole.values() for im in batch} == {"0", "1", "2", "4", "5"}
    assert steady.bad["too_short"] >= 2
    starts = {(im.sample_id, index_of(im.pixels[0])) for batch in whole.values() for im in batch}
    assert len(starts) > 5  # other epochs show other parts of a video


def test_a_broken_image_is_replaced_counted_and_logged_once(folder, source, caplog):
    samples = folder(20, broken=[4])
    batches = source(samples, global_batch=20, shuffle=False)
    for step in (1, 2):
        images = batches.read_batch(step, 0, 1)
        assert [im.sample_id for im in images] == [f"{14 if i == 4 else i:03}" for i in range(20)]
        assert (images[4].position, images[4].prompt.text) == ((step - 1) * 20 + 4, "grey 14")
    assert batches.bad == {"decode": 2}
    (message,) = caplog.messages
    assert "004.png: cannot be decoded" in message


def test_what_the_scan_rejected_is_counted_once_and_what_ranks_met_is_summed(folder, source):
    batches = source(folder(20, broken=[4]), global_batch=20, rejected={"no_json": 3, "no_media": 0})
    batches.read_batch(1, 0, 1)
    counts = batches.bad_counts(lambda met: {tag: 2 * count for tag, count in met.items()})
    assert counts == {
        "data/bad/decode": 2,
        **dict.fromkeys((f"data/bad/{reason}" for reason in (*BAD_MEDIA_REASONS, "no_media") if reason != "decode"), 0),
        "data/bad/no_json": 3,
    }


def test_a_broken_substitute_is_replaced_by_the_next(folder, source):
    batches = source(folder(20, broken=[4, 14, 15]), global_batch=5, shuffle=False, max_bad_fraction=0.5)
    assert batches.read_batch(1, 0, 1)[4].sample_id == "016"
    assert batches.bad == {"decode": 3}


def test_more_bad_files_than_allowed_stop_the_run(folder, source):
    """One of 20 files is broken: max_bad_fraction 0.05 allows it on every encounter, 0.04 does not."""
    samples = folder(20, broken=[4])
    patient = source(samples, global_batch=20, shuffle=False, max_bad_fraction=0.05)
    for step in range(1, 61):
        patient.read_batch(step, 0, 1)
    strict = source(samples, global_batch=20, shuffle=False, max_bad_fraction=0.04)
    with pytest.raises(DataError, match=r"1 of 20 samples are invalid .*max_bad_fraction: 0\.04.*004\.png: cannot be"):
        strict.read_batch(1, 0, 1)


def test_a_bad_stretch_of_a_large_folder_stops_the_run_before_all_of_it_is_seen(folder, source, monkeypatch):
    monkeypatch.setattr(batch_reader, "WINDOW", 20)
    samples = folder(100, broken=range(50, 55))  # 5 % of all files, which is allowed, but a quarter of the last 20
    stretch = source(samples, global_batch=10, shuffle=False, max_bad_fraction=0.05)
    for step in range(1, 6):
        stretch.read_batch(step, 0, 1)
    with pytest.raises(DataError, match=r"2 of the last 20 files are invalid"):
        stretch.read_batch(6, 0, 1)


def test_nothing_but_broken_files_stops_at_once(folder, source):
    samples = folder(3, broken=[0, 1, 2])
    with pytest.raises(DataError, match=r"all its substitutes are invalid \(11 files\): .*000\.png.*; .*00[12]\.png"):
        source(samples, max_bad_fraction=1.0).read_batch(1, 0, 1)


class Stalled(LocalFile):
    """An image on a file system that does not respond, simulated by a named pipe."""

    def open(self):
        return open(self.file, "rb")


def blocking(samples, place):
    """Replace an image by a pipe. Reading it blocks until the returned thread writes to the pipe."""
    path = samples[place].media.path
    path.unlink()
    os.mkfifo(path)
    samples[place] = dataclasses.replace(samples[place], media=Stalled(path))
    return threading.Thread(target=lambda: os.close(os.open(path, os.O_WRONLY)), daemon=True)


def test_the_next_step_is_read_while_this_one_trains(folder, source):
    samples = folder(20)
    writer = blocking(samples, 7)
    assert len(source(samples, global_batch=4, shuffle=False).read_batch(1, 0, 1)) == 4
    writer.start()
    writer.join(30)
    assert not writer.is_alive()  # image 7 was opened before step 2 was requested


def test_a_file_system_that_hangs_is_an_error(folder, source, monkeypatch):
    samples = folder(20)
    writer = blocking(samples, 0)
    monkeypatch.setattr(batch_reader, "READ_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match=r"reading the sample at position 0 exceeded 0\.2 s"):
        source(samples, shuffle=False).read_batch(1, 0, 1)
    writer.start()
    writer.join(30)


def test_a_global_batch_must_be_divisible_by_the_ranks(folder, source):
    with pytest.raises(ValueError, match="5 ranks cannot share a global batch of 12"):
        source(folder(20)).read_batch(1, 0, 5)


def test_no_sample_is_an_error(source):
    with pytest.raises(DataError, match="no training sample"):
        source([])
