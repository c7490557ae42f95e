"""The numbers of files and of nested calls in one training step (CONTRIBUTING.md)."""

import re

import pytest

from commands import run_module
from wfm_ds.demos import digits_data


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "max_files"), [("sd3_nft", 35), ("sd3_sft", 25)])
def test_a_step_calls_functions_of_few_files(recipe, max_files, tmp_path):
    overrides = []
    if recipe == "sd3_sft":
        digits_data.write_digits(tmp_path / "digits")
        overrides = [f"data.path={tmp_path / 'digits' / 'images'}"]
    printed = run_module("benchmarks.code_path", f"tests/recipes/{recipe}.yaml", *overrides).stdout
    files, depth = map(int, re.search(r" step: (\d+) files, (\d+) frames deep", printed).groups())
    assert 15 < files <= max_files
    assert depth <= 20
