"""Generate the reference page of recipes from the schema.

python -m wfm_ds.recipe_docs docs/recipes.md     writes the page
python -m wfm_ds.recipe_docs --json-schema       prints a JSON schema, for editors
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wfm_ds.program import run_command
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import SchemaNode, describe_type, iterate_sections
from wfm_ds.recipe.tree import KeyPath

INTRO_TEXT = """\
# Recipes

A recipe is a YAML file that describes a training run: model, data, algorithm, optimizer, and output folder. Run it
with

    deepspeed --num_gpus 8 -m wfm_ds.train recipes/sd3_nft.yaml

The sections `run`, `model`, `data`, `sampling` and `algorithm` are required. An omitted section has the defaults below,
or is off if this page says so. The resolved recipe with all defaults is stored as `recipe.yaml` in the output folder
and can be used as a recipe.

## A complete example

```yaml
{example}```

## Changing values on the command line

`section.key=value` arguments after the recipe override its values. Values are YAML, numbers in the path are list
indices starting from 0, and `null` removes a section:

    deepspeed --num_gpus 8 -m wfm_ds.train recipes/sd3_nft.yaml run.steps=200 optimizer.lr=1e-4 lora=null \\
        validation.seeds=[1,2] reward.functions.0.weight=2 algorithm.old_decay.slope=0.01

The shell interprets quotes and spaces, so quote the whole argument: `'sampling.negative_prompt=blurry, dark'`.
`algorithm.name=NAME` removes the keys of the recipe's previous algorithm.

## Variants of a recipe

The top-level key `defaults: base.yaml` includes another recipe. Its path is relative to the including file, and the
included recipe cannot have `defaults`. Mappings are merged key by key. Lists and single values replace the base's
values. A section set to `null` is removed. If the variant has another algorithm, the base's `algorithm` keys are
dropped.

```yaml
defaults: sd3_nft.yaml
run:
  output_dir: outputs/sd3_nft_full
lora: null             # train all weights
algorithm:
  kl_beta: 0.001
```

## Checking a recipe

    python -m wfm_ds.train recipes/sd3_nft.yaml --check

validates the recipe, data, model and rewards, prints derived numbers, and exits without training. Errors name the
file and line (or the override), the key, and the expected value. All errors of a recipe are reported together, and the
exit code is 2:

    recipes/mine.yaml:17: algorithm.timestep_fracton is not a key of diffusion_nft; did you mean timestep_fraction?
    override optimizer.lr=-1: optimizer.lr: expected a number > 0, got -1

## Paths and YAML

Relative paths in a recipe are relative to the working directory; only `defaults` is relative to its file. `1e-4` is a
number. Booleans are `true` and `false`; `yes`, `no`, `on` and `off` are also accepted, but are strings in
`reward.functions.N.options`. Strings that look like numbers or booleans need quotes. Duplicate keys are errors, and
anchors (`&name`, `*name`) are supported. A recipe or override has at most 1,048,576 characters, 10,000 keys and values
(with aliases expanded) and 32 levels. Numbers must be finite; a path has at most 3500 bytes.

"""

EXAMPLE_RECIPE = """\
run:
  output_dir: outputs/first_nft
  steps: 20                        # RL steps: rollout, rewards, update
model:
  path: tiny:sd3                   # a tiny random pipeline, to try a run on a CPU
  dtype: float32
lora:
  rank: 8
  alpha: 16
engine:
  micro_batch_size: 8
optimizer:
  lr: 3e-4
data:
  kind: prompts
  path: recipes/tiny/prompts/colors  # contains train.txt, one prompt per line
sampling:
  height: 32
  width: 32
  steps: 6
  eval_steps: 6
algorithm:
  name: diffusion_nft
  old_decay: {slope: 0.01, max: 0.9}
rollout:
  prompts_per_step: 4
  group_size: 4
reward:
  functions:
    - {name: color}
    - {name: jpeg_compressibility, weight: 0.5}
validation:
  every: 10
  num_prompts: 4
"""

REFERENCE_TEXT = """\
## Reference

Every key, in the order of the schema. A key without a default must be given.

"""


RL_SECTIONS = ("rollout", "reward")


def render_page() -> str:
    """Return the whole page."""
    parts = [INTRO_TEXT.replace("{example}", EXAMPLE_RECIPE), REFERENCE_TEXT]
    for path, title, section in iterate_sections():
        summary = join_lines(section.__doc__ or "")
        parts.append(f"### {section_heading(path, title)}\n\n{summary}{optional_note(path)}\n\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += [field_row(name, field) for name, field in section.model_fields.items()]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def section_heading(path: KeyPath, title: str) -> str:
    if path == ("algorithm",):
        return f"`algorithm` with `name: {title}`"
    if path == ("sampling", "window"):
        return f"`sampling.window` with `kind: {title}`"
    return f"`{title}`"


def optional_note(path: KeyPath) -> str:
    """Return a note if a section is required. The docstrings of optional sections state that they are off."""
    if len(path) > 1:
        return ""
    if path[0] in RL_SECTIONS:
        return " Required for reinforcement learning, rejected for `sft` and `dpo`."
    return " Required." if Recipe.model_fields[str(path[0])].is_required() else ""


def field_row(name: str, field: FieldInfo) -> str:
    cells = [
        f"`{name}`",
        describe_type(SchemaNode.from_field(field)),
        default_text(field),
        join_lines(field.description or ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "its defaults"
    plain = json.dumps(value)
    return f"`{plain.strip(chr(34)) if isinstance(value, str) else plain}`"


def join_lines(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the resolved recipe, i.e. without `defaults`."""
    return Recipe.model_json_schema()


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), write_page, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm_ds.recipe_docs", description="Write the reference page of recipes.")
    p.add_argument("page", type=Path, nargs="?", help="the file to write (default: stdout)")
    p.add_argument("--json-schema", action="store_true", help="print the JSON schema instead of the page")
    return p


def write_page(args: argparse.Namespace) -> None:
    text = json.dumps(json_schema(), indent=2) + "\n" if args.json_schema else render_page()
    if args.page is None:
        sys.stdout.write(text)
    else:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
