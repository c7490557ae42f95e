"""Aspect-ratio buckets: each sample gets the size nearest to its own shape, and the sample order equals a plain
simulation."""

import itertools
import json
import math
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clips import write_clip
from each_case import check_each
from wfm_ds.data import order as order_module
from wfm_ds.data.buckets import Buckets, automatic_sizes, nearest_size
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.order import BatchSource, BucketOrder, sample_index
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile
from wfm_ds.seeds import derive_seed

SIDES = st.integers(1, 5000)
SIZES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=8, unique=True)


@given(SIZES, SIDES, SIDES, st.integers(1, 4))
def test_the_nearest_size_has_the_nearest_shape_whatever_the_scale(sizes, height, width, scale):
    def distance(size):
        return abs(math.log(size[0] / size[1]) - math.log(height / width))

    chosen = sizes[nearest_size(sizes, height, width)]
    assert distance(chosen) == pytest.approx(min(map(distance, sizes)), abs=1e-9)
    scaled = sizes[nearest_size(sizes, scale * height, scale * width)]
    assert scaled[0] * chosen[1] == scaled[1] * chosen[0]


@check_each(
    ("height", "width", "size"),
    [(512, 512, (512, 512)), (1500, 1400, (1024, 1024)), (900, 1000, (512, 512)), (100, 100, (512, 512))],
)
def test_of_equal_shapes_the_largest_that_is_not_enlarged_is_taken(height, width, size):
    sizes = [(1024, 1024), (512, 512), (2048, 1024)]
    assert sizes[nearest_size(sizes, height, width)] == size


def test_of_equally_near_shapes_the_first_is_taken():
    assert [nearest_size(sizes, 8, 8) for sizes in ([(8, 16), (16, 8)], [(16, 8), (8, 16)])] == [0, 0]


@given(st.integers(4, 60), st.integers(4, 60), st.sampled_from([2, 4, 16, 32]))
def test_automatic_sizes_have_the_same_number_of_pixels_but_for_the_multiple(high, wide, multiple):
    height, width = high * multiple, wide * multiple
    sizes = automatic_sizes(height, width, multiple)
    assert sizes[0] == (height, width)
    assert len(set(sizes)) == len(sizes) <= 12
    for h, w in sizes[1:]:
        assert (w, h) in sizes
        assert h % multiple == w % multiple == 0
        assert abs(math.sqrt(h * w) - math.sqrt(height * width)) <= multiple


def test_automatic_sizes_do_not_change():
    square = [(1024, 1024), (928, 1152), (896, 1184), (832, 1248), (768, 1376), (736, 1440)]
    assert automatic_sizes(1024, 1024, 32) == [*square, *((h, w) for w, h in square[1:])]


@pytest.mark.parametrize("turned", [False, True])
def test_media_get_the_framing_of_their_shape_as_they_are_shown(tmp_path, turned):
    buckets = Buckets(Framing(height=1, width=1, num_frames=5, crop="random"), [(8, 8), (8, 16), (16, 8)])
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    Image.new("RGB", (30, 16)).save(tmp_path / "a.png", exif=exif)
    height, width = (16, 8) if turned else (8, 16)
    want = Framing(height=height, width=width, num_frames=5, crop="random")
    assert buckets.choose_framing(LocalFile(tmp_path / "a.png")) == want
    clip = write_clip(tmp_path / "a.mp4", count=2, size=(2 * height, 2 * width))
    assert buckets.choose_framing(LocalFile(clip)) == want


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_a_broken_file_goes_to_the_first_size_where_it_fails_when_it_is_decoded(tmp_path, name):
    (tmp_path / name).write_bytes(b"nothing")
    assert Buckets(Framing(height=1, width=1), [(8, 16), (8, 8)]).choose_bucket(LocalFile(tmp_path / name)) == 0


def dealt_by_hand(buckets, unit, seed, shuffle):
    """Yield (epoch, index) for positions 0, 1, ...: a direct implementation of the docstring of BucketOrder."""
    waiting = {bucket: [] for bucket in buckets}
    for position in itertools.count():
        index = sample_index(position, len(buckets), seed, shuffle)
        pile = waiting[buckets[index]]
        pile.append((position // len(buckets), index))
        if len(pile) == unit:
            yield from pile
            pile.clear()


def seen(order, positions):
    places = [order.locate(position) for position in positions]
    return [(place.epoch, order.sample_index(place)) for place in places]


ORDERS = {
    "buckets": st.lists(st.integers(0, 3), min_size=1, max_size=30),
    "unit": st.integers(1, 9),
    "seed": st.integers(0, 2**63 - 1),
    "shuffle": st.booleans(),
}


@given(**ORDERS)
def test_the_order_equals_a_plain_simulation(buckets, unit, seed, shuffle):
    order = BucketOrder(buckets, unit=unit, seed=seed, shuffle=shuffle)
    count = unit * (2 + 3 * len(buckets) // unit)
    want = list(itertools.islice(dealt_by_hand(buckets, unit, seed, shuffle), count))
    assert seen(order, range(count)) == want
    assert seen(order, reversed(range(count))) == want[::-1]


@given(**ORDERS, first=st.integers(0, 10**6))
def test_also_in_late_epochs_units_have_one_bucket_and_nothing_repeats(buckets, unit, seed, shuffle, first):
    order = BucketOrder(buckets, unit=unit, seed=seed, shuffle=shuffle)
    shown = seen(order, range(first * unit, (first + 12) * unit))
    assert len(set(shown)) == len(shown)
    for start in range(0, len(shown), unit):
        assert len({buckets[index] for _, index in shown[start : start + unit]}) == 1


@given(buckets=st.lists(st.integers(0, 2), min_size=1, max_size=20), unit=st.integers(1, 5))
def test_over_many_epochs_every_sample_is_shown_equally_often(buckets, unit):
    order = BucketOrder(buckets, unit=unit, seed=1, shuffle=True)
    epochs = unit * 3  # after this many epochs no unit is incomplete
    shown = seen(order, range(epochs * len(buckets)))
    assert sorted(index for _, index in shown) == sorted(epochs * list(range(len(buckets))))


def test_an_epoch_of_many_samples_needs_little_memory():
    count = 20_000
    order = BucketOrder(np.arange(count) % 3, unit=1, seed=0, shuffle=True)
    tracemalloc.start()
    order.locate(0)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 40 * count  # bytes: two int64 for the order, an int64 and an int32 for the units


def test_threads_compute_an_epoch_only_once(monkeypatch):
    calls, second, epoch_order = [], threading.Event(), order_module.epoch_order

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            second.set()
        second.wait(0.3)  # long enough for another thread to arrive here without a lock
        return epoch_order(*arguments)

    monkeypatch.setattr(order_module, "epoch_order", counted)
    order = BucketOrder([0, 1] * 20, unit=2, seed=0, shuffle=True)
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(order.locate, range(8)))
    assert [place.epoch for place in places] == [0] * 8
    assert len(calls) == 1


def test_the_order_does_not_change():
    order = BucketOrder([0, 1, 0, 0, 2, 1, 0], unit=2, seed=0, shuffle=True)
    assert [index for _, index in seen(order, range(16))] == [1, 5, 3, 2, 6, 0, 0, 2, 5, 1, 6, 3, 4, 4, 3, 6]


SIZE_OF = [(8, 8), (8, 16), (16, 8)]


@pytest.fixture
def mixed(tmp_path):
    """Write 25 images in three shapes; image i has gray level i. Return a factory of sources, and the buckets."""
    buckets = [derive_seed(0, "shape", i) % 3 for i in range(25)]
    for i, bucket in enumerate(buckets):
        height, width = SIZE_OF[bucket]
        Image.new("RGB", (3 * width, 3 * height), (i, i, i)).save(tmp_path / f"{i:02}.png")
        (tmp_path / f"{i:02}.json").write_text(json.dumps({"prompt": f"grey {i}"}))
    made = []

    def source(**settings):
        samples = CaptionedFolder(tmp_path, max_bad_fraction=0.0).samples
        framings = Buckets(Framing(height=1, width=1), SIZE_OF)
        defaults = {
            "global_batch": 12,
            "seed": 3,
            "shuffle": True,
            "max_bad_fraction": 0.5,
            "framings": framings.framings,
            "buckets": [framings.choose_bucket(sample.media) for sample in samples],
            "unit": 3,
        }
        made.append(BatchSource(samples, **defaults | settings))
        return made[-1]

    yield source, buckets, tmp_path
    for one in made:
        one.close()


def shown(images):
    return [(im.sample_id, im.epoch, im.position, im.pixels.shape, int(im.pixels[0, 0, 0])) for im in images]


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
