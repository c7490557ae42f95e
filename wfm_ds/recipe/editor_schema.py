"""JSON schema of recipe files. Editors use it to complete keys, show descriptions and mark mistakes.

It checks keys, types and values, but not whether values fit together.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from wfm_ds.recipe.schema import LANGUAGE_ALGORITHMS, Recipe
from wfm_ds.recipe.section import UserClass

Schema: TypeAlias = dict[str, Any]

DEFAULTS_DESCRIPTION = "Path of a base recipe, relative to this file. Values of this file replace its values."
ALGORITHM_DESCRIPTION = "Loss and its settings, selected by `name` (docs/algorithms.md)."
REFERENCE = re.compile(r'"#/\$defs/(\w+)"')


def build_schema() -> Schema:
    """Return the JSON schema (draft 7) of a recipe file, before `defaults` is merged."""
    schema = _simplify(Recipe.model_json_schema())
    definitions, sections = schema["$defs"], schema["properties"]
    in_lists = _find_list_items(definitions)
    needed_keys: Schema = {"algorithm": {"required": ["name"]}}
    for name, section in sections.items():
        reference = REFERENCE.search(json.dumps(section))
        assert reference is not None, f"section {name} has no class"
        if name == "algorithm":
            section["description"] = ALGORITHM_DESCRIPTION
            continue
        definition = definitions[reference[1]]
        sections[name] = {"$ref": f"#/$defs/{reference[1]}"}
        if "required" in definition:
            needed_keys[name] = {"required": definition["required"]}
        if name == "sampling" or name not in schema["required"]:
            definition["type"] = ["object", "null"]  # null removes the section of the base recipe
    # A variant need not repeat keys of its base recipe. Its lists replace the lists of the base recipe.
    for name in definitions.keys() - in_lists:
        definitions[name].pop("required", None)
    required_sections = [name for name in schema.pop("required") if name != "sampling"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "properties": {"defaults": {"type": "string", "description": DEFAULTS_DESCRIPTION}, **sections},
        "if": {"not": {"required": ["defaults"]}},
        "then": {
            "required": required_sections,
            "properties": needed_keys,
            "if": _match_value("algorithm", _match_value("name", {"enum": sorted(LANGUAGE_ALGORITHMS)})),
            "then": {"properties": {"sampling": {"type": "null"}}},
            "else": _match_value("sampling", {"type": "object"}),
        },
    }


def format_schema() -> str:
    return _format_json(build_schema(), depth=4) + "\n"


def _format_json(node: Any, depth: int, indent: str = "") -> str:
    if depth == 0 or not isinstance(node, dict):
        return json.dumps(node)
    entries = (f'{indent} "{key}": {_format_json(value, depth - 1, indent + " ")}' for key, value in node.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _simplify(node: Any) -> Any:
    if isinstance(node, list):
        return [_simplify(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        return _select_by_key(node["discriminator"]["propertyName"], node["discriminator"]["mapping"])
    result = {key: _simplify(value) for key, value in node.items()}
    if isinstance(result.get("title"), str):
        del result["title"]
    if result.get("default", ()) is None or isinstance(result.get("default"), dict):
        del result["default"]  # editors would insert it
    if isinstance(result.get("description"), str):
        result["description"] = " ".join(result["description"].split())
    null = {"type": "null"}
    if len(result.get("anyOf", ())) == 2 and result["anyOf"][1] == null and "type" in result["anyOf"][0]:
        value = result.pop("anyOf")[0]
        result |= value | {"type": [value["type"], "null"]}
        if "enum" in value:
            result["enum"] = [*value["enum"], None]
    if "prefixItems" in result:  # not in draft 7
        first, *others = result.pop("prefixItems")
        assert all(other == first for other in others), "a tuple with entries of several types"
        result["items"] = first
    return result


def _select_by_key(key: str, members: dict[str, str]) -> Schema:
    """Return a union as if/then conditions: the value of `key` selects the member. If it is absent, all are allowed.

    members: {value of the key: reference to the definition}.
    """
    values: Schema = {"enum": list(members)}
    references = [{"$ref": reference} for reference in members.values()]
    if key == "name":
        values = {"anyOf": [values, TypeAdapter(UserClass).json_schema()]}
    return {
        "type": "object",
        "properties": {key: values},
        "allOf": [
            *({"if": _match_value(key, {"const": value}), "then": {"$ref": members[value]}} for value in members),
            {"if": {"not": {"required": [key]}}, "then": {"anyOf": references}},
        ],
    }


def _match_value(key: str, schema: Schema) -> Schema:
    return {"type": "object", "required": [key], "properties": {key: schema}}


def _find_list_items(node: Any) -> set[str]:
    entries = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    found = set[str]().union(*map(_find_list_items, entries))
    if isinstance(node, dict) and "items" in node:
        found |= set(REFERENCE.findall(json.dumps(node["items"])))
    return found
