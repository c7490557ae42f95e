from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.seeds import derive_seed, draw_uniform

KEYS = st.lists(st.integers(-(2**40), 2**40) | st.text(max_size=8), max_size=4)


@given(st.integers(0, 2**40), KEYS)
def test_seed_is_a_function_of_its_key_in_the_range_of_a_generator(run_seed, key):
    seed = derive_seed(run_seed, "purpose", *key)
    assert seed == derive_seed(run_seed, "purpose", *key)
    assert 0 <= seed < 2**63


def test_seed_does_not_change_between_versions():
    assert derive_seed(0, "init_noise", 1, 2, 3) == 3401630761385501956


@check_each("other", [(1, "a", 2), (0, "b", 2), (0, "a", 3), (0, "a", 2, 0), (0, "a"), (0, "a", 22)])
def test_every_part_of_the_key_matters(other):
    assert derive_seed(*other) != derive_seed(0, "a", 2)


def test_uniform_draws_fill_the_unit_interval_evenly():
    draws = [draw_uniform(0, "test", i) for i in range(4000)]
    assert min(draws) >= 0
    assert max(draws) < 1
    counts = [sum(k / 8 <= d < (k + 1) / 8 for d in draws) for k in range(8)]
    assert sum((c - 500) ** 2 / 500 for c in counts) < 24.3  # chi-square, 7 degrees of freedom, p = .001
