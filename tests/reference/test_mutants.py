"""The mutants match the current code. `python tests/reference/mutants.py` checks that tests detect them."""

import ast
from pathlib import Path

from each_case import check_each
from reference.mutants import MUTANTS, ROOT


@check_each("mutant", MUTANTS)
def test_each_mutant_is_a_line_of_the_code_and_names_a_test(mutant):
    text = (ROOT / mutant.find_file()).read_text()
    ast.parse(text.replace(mutant.old, mutant.new))
    file, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text()


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
