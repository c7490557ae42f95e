import random
import statistics
import threading
import time

import pytest

from benchmarks.overhead import median_interval, time_in_pairs, wait_until_idle


def use_processor(seconds):
    """Keep a CPU busy for `seconds` of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize(("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (40, (14, 27))])
def test_ranks_are_those_of_tables_of_the_sign_test(n, ranks):
    """Conover, Practical Nonparametric Statistics, table of the binomial distribution at 1/2, both tails 2.5 %."""
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert median_interval(values) == ranks


def test_the_interval_contains_the_median_with_its_probability():
    drawn = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = median_interval([drawn.expovariate(1.0) for _ in range(15)])
        inside += low <= 0.6931 <= high  # the median of an exponential variable is log 2
    assert 0.95 < inside / 2000 < 0.985  # 0.965 by the binomial, and four standard errors of 2000 tries


def test_five_pairs_are_too_few():
    with pytest.raises(ValueError, match="5 pairs"):
        median_interval([1.0] * 5)


def test_work_of_a_thread_belongs_to_the_block_that_started_it():
    began = wait_until_idle()
    thread = threading.Thread(target=use_processor, args=(0.05,))
    thread.start()
    assert wait_until_idle() - began >= 0.05
    thread.join()


def test_a_pair_compares_what_each_call_costs(monkeypatch):
    monkeypatch.setattr("benchmarks.overhead.BLOCK_S", 0.01)
    ours, bare = time_in_pairs(lambda: use_processor(0.004), lambda: use_processor(0.002), 6)
    assert len(ours) == len(bare) == 6
    assert statistics.median(a / b for a, b in zip(ours, bare, strict=True)) == pytest.approx(2, rel=0.3)
