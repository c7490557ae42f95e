from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import MinLen
from pydantic import Field, NonNegativeInt, PositiveInt

from wfm_ds.recipe.describe import ROOT, Slot, kinds, sections, words
from wfm_ds.recipe.schema import Recipe


@pytest.mark.parametrize(
    ("annotation", "want"),
    [
        (PositiveInt | None, "a whole number > 0"),
        (Annotated[float, Field(ge=0, lt=1)], "a number >= 0 and < 1"),
        (Literal["a", "b"], "one of a, b"),
        (Annotated[list[NonNegativeInt], MinLen(1)], "a list of at least 1, each a whole number >= 0"),
        (tuple[float, str], "a list of 2, a number, text"),
        (dict[str, Any], "a mapping"),
        (Path | bool, "a path or true or false"),
    ],
)
def test_types_are_said_in_words(annotation, want):
    assert words(Slot.of(annotation)) == want


def test_every_key_of_the_schema_has_words_kinds_and_a_description():
    found = {(path, title) for path, title, _ in sections()}
    assert {(("algorithm",), "sft"), (("algorithm",), "diffusion_nft")} <= found
    assert {path[0] for path, _ in found} == set(Recipe.model_fields)
    for _, title, section in sections():
        assert section.__doc__, title
        for name, field in section.model_fields.items():
            slot = Slot.of_field(field)
            assert "anything" not in words(slot), (title, name)
            assert field.description, (title, name)
            assert kinds(slot) or "list" in words(slot) or "mapping" in words(slot), (title, name)


def test_the_selected_algorithm_decides_which_keys_exist():
    algorithm = ROOT.inner("algorithm", {})
    assert algorithm.inner("beta", {"name": "diffusion_nft"}) is not None
    assert algorithm.inner("beta", {"name": "sft"}) is None
    assert algorithm.inner("beta", {"name": "unheard"}) is None
