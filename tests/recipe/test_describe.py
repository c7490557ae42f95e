from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field, NonNegativeInt, PositiveInt

from each_case import check_each
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import SCHEMA_ROOT, SchemaNode, describe_type, iterate_sections, scalar_types


@check_each(
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
def test_types_are_described_in_words(annotation, want):
    assert describe_type(SchemaNode.from_annotation(annotation)) == want


def test_every_key_of_the_schema_has_words_kinds_and_a_description():
    found = {(path, title) for path, title, _ in iterate_sections()}
    assert {(("algorithm",), "sft"), (("algorithm",), "diffusion_nft")} <= found
    assert {path[0] for path, _ in found} == set(Recipe.model_fields)
    for _, title, section in iterate_sections():
        assert section.__doc__, title
        for name, field in section.model_fields.items():
            slot = SchemaNode.from_field(field)
            assert "anything" not in describe_type(slot), (title, name)
            assert field.description, (title, name)
            assert scalar_types(slot) or "list" in describe_type(slot) or "mapping" in describe_type(slot), (
                title,
                name,
            )


def test_the_selected_algorithm_decides_which_keys_exist():
    algorithm = SCHEMA_ROOT.child("algorithm", {})
    assert algorithm.child("beta", {"name": "diffusion_nft"}) is not None
    assert algorithm.child("beta", {"name": "sft"}) is None
    assert algorithm.child("beta", {"name": "unheard"}) is None
