"""`wfm models`: list the supported model families, or describe a pipeline folder."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from wfm_ds.program import CommandParser

GB = 10**9


def parser() -> CommandParser:
    p = CommandParser(
        description="List the supported model families and their pipelines, or describe a pipeline folder.",
        epilog="Example: %(prog)s tiny:sd3",
    )
    p.add_argument("path", nargs="?", help="a diffusers pipeline folder, owner/name on the Hub, or tiny:FAMILY")
    p.add_argument("--revision", help="branch, tag or commit on the Hub (default main)")
    p.add_argument("--download", action="store_true", help="also download the weights from the Hub")
    p.key_options = {"model.path": "PATH", "model.revision": "--revision"}
    return p


def run(args: argparse.Namespace) -> None:
    sys.stdout.write(
        list_families() if args.path is None else describe_model(args.path, args.revision, weights=args.download)
    )


def list_families() -> str:
    from wfm_ds.models import registry, tiny

    rows = [(name, family.pipeline_classes) for name, family in sorted(registry.model_families().items())]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:{width}}{', '.join(classes)}" for name, classes in rows]
    return (
        "\n".join([*lines, "", f"tiny random models for tests: {', '.join(f'tiny:{name}' for name in tiny.FAMILIES)}"])
        + "\n"
    )


def describe_model(path: str, revision: str | None = None, *, weights: bool = False) -> str:
    """Return a description of a pipeline folder or Hub repository. weights: also download the weights.

    Raises ModelError if it is not a pipeline or if its family is not supported.
    """
    from wfm_ds.models import registry
    from wfm_ds.models.assets.loading import read_json

    folder = registry.resolve_pipeline(path, None, revision, weights=weights)
    family = registry.find_family(folder)
    index: dict[str, Any] = read_json(folder / "model_index.json")
    rows = {
        "pipeline": index["_class_name"],
        "family": f"{family.family}, supported",
        "folder": str(folder),
        "LoRA on": ", ".join(family.default_lora_targets) + " (lora.target_modules)",
    }
    if specs := family.input_specs:
        inputs = [f"{name}{' (required)' if spec.required else ''}" for name, spec in specs.items()]
        rows["inputs"] = f"{', '.join(inputs)} (data.inputs)"
    components = (name for name, value in index.items() if isinstance(value, list) and value[0] is not None)
    sizes = {name: sum(file.stat().st_size for file in (folder / name).glob("*.safetensors")) for name in components}
    parts = [f"  {name:18}{size / GB:.3f} GB\n" for name, size in sizes.items() if size]
    return "".join(f"{name:10}{text}\n" for name, text in rows.items()) + "weights\n" + "".join(parts)
