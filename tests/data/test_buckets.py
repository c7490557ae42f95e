"""Aspect-ratio buckets: each sample gets the size nearest to its own shape, and the sample order equals a plain
simulation."""

import itertools
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
from wfm_ds.data.order import BucketOrder, sample_index
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile

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
    assert nearest_size([(8, 16), (16, 8)], 8, 8) == nearest_size([(16, 8), (8, 16)], 8, 8) == 0  # the first of two


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
