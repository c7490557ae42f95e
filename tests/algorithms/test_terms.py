from collections import Counter
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from wfm_ds.recipe.algorithms import count_of_fraction
from wfm_ds.seeds import draw_permutation


@given(st.integers(0, 60), st.integers(0, 2**63 - 1))
def test_every_number_occurs_once_and_the_key_determines_the_order(count, seed):
    order = draw_permutation(count, seed, "a", 3)
    assert sorted(order) == list(range(count))
    assert order == draw_permutation(count, seed, "a", 3)


def test_another_purpose_key_or_seed_gives_another_order():
    orders = [draw_permutation(20, *key) for key in [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2)]]
    assert len({tuple(order) for order in orders}) == 4


def test_all_orders_are_equally_likely():
    num_draws = 6000
    counts = Counter(tuple(draw_permutation(3, 5, "a", k)) for k in range(num_draws))
    expected = num_draws / 6
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in permutations(range(3)))
    assert chi_square < 20.5  # chi-square test, 99.9 % quantile, 5 degrees of freedom


def test_fractions_of_counts_are_exact():
    """Binary floating point gives 50 * .58 = 28.999..."""
    fractions = {(50, 0.58): 29, (10, 0.99): 9, (12, 0.34): 4, (3, 0.1): 1}
    assert {key: count_of_fraction(*key) for key in fractions} == fractions
