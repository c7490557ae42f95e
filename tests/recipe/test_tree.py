import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from wfm_ds.recipe.tree import SourceLocation, apply_overrides, merge_trees, parse_yaml, to_yaml

KEYS = st.sampled_from(["a", "b", "c"])
FIT = st.characters(codec="utf-8", exclude_characters="\0")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(KEYS, VALUES, max_size=3)


def merged(base, variant):
    """Merge by its recursive definition."""
    if not (isinstance(base, dict) and isinstance(variant, dict)):
        return variant
    return base | {k: merged(base[k], v) if k in base else v for k, v in variant.items()}


def paths(values, path=()):
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path] + [p for key, value in entries for p in paths(value, (*path, key))]


@settings(max_examples=100, deadline=None)
@given(base=MAPPINGS, variant=MAPPINGS)
def test_merge_is_its_definition_and_every_value_has_a_place_in_its_file(base, variant):
    tree = merge_trees(parse_yaml(to_yaml(base), "base"), parse_yaml(to_yaml(variant), "variant"))
    assert tree.values == merged(base, variant)
    assert set(tree.locations) == set(paths(tree.values))
    theirs = set(paths(variant))
    assert all((tree.locate(p).source == "variant") == (p in theirs or p == ()) for p in paths(tree.values))


@settings(max_examples=100, deadline=None)
@given(values=MAPPINGS)
def test_text_and_values_are_one_to_one_for_readers_of_either_yaml(values):
    assert repr(parse_yaml(to_yaml(values), "x").values) == repr(values)  # == would accept 1 for true
    assert repr(yaml.safe_load(to_yaml(values))) == repr(values)


def test_every_key_and_entry_knows_its_line():
    tree = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "f.yaml")
    lines = {(): 1, ("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5, ("a", "c", 1, "d"): 5}
    assert tree.locations == {path: SourceLocation("f.yaml", line) for path, line in lines.items()}
    assert str(tree.locate(("a", "c", 1, "missing"))) == "f.yaml:5"


def test_an_override_owns_its_value_and_nothing_else():
    tree = parse_yaml("a:\n  b: {c: 1}\n  d: 2\n", "f.yaml")
    apply_overrides(tree, ["a.b={x: 3}"])
    assert tree.values == {"a": {"b": {"x": 3}, "d": 2}}
    assert str(tree.locate(("a", "b", "x"))) == "override a.b={x: 3}"
    assert str(tree.locate(("a", "d"))) == "f.yaml:3"
