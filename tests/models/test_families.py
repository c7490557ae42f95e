"""Run the checks of `wfm_ds.cli.models_check` for every family: its tiny pipeline against the stock diffusers code."""

import pytest

from families import CASES, each_family
from wfm_ds.contract.checks import CHECKS
from wfm_ds.contract.family_under_test import CheckNotApplicable, FamilyUnderTest


@pytest.fixture(scope="module")
def subject(tiny_pipelines):
    """Return the `FamilyUnderTest` of a family; checks that modify nothing share its float32 model."""
    known = {}

    def get(family):
        return known.setdefault(family, FamilyUnderTest(tiny_pipelines(family), CASES[family]))

    return get


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@each_family()
def test_a_family_passes_all_contract_checks(subject, family, check):
    try:
        check(subject(family))
    except CheckNotApplicable as reason:
        pytest.skip(str(reason))
