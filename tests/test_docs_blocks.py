"""Code blocks of the docs are valid: recipes load, commands parse, Python compiles and its imports succeed.

The language of a fenced block selects its check (block_checks.py):
yaml    a whole recipe, some sections of a recipe, or a configuration of the reward service
bash    commands: ours are parsed by their own parsers, others must be in OTHER_PROGRAMS
python  compiles; imports from our packages work
json    one value
text    an illustration, not checked
Overrides of the reader's own recipe must fit a whole recipe on the page. If the page has none, they must fit a
fragment on the page or a minimal recipe. A command in prose needs a valid name and valid option names.
"""

import itertools
import json
import re
import textwrap
from functools import partial
from pathlib import Path

import pytest

import block_checks
from wfm_ds.errors import UserError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(text):
    """Return (line, language, text) of every block. A line outside of blocks has the language "prose".

    An unclosed block has the language "open".
    """
    blocks, language, start, lines = [], None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*(?:```|~~~)+\s*(.*)$", line)
        if fence and language is None:
            language, start, lines = fence[1], number, []
        elif fence:
            blocks.append((start, language, textwrap.dedent("\n".join(lines)) + "\n"))
            language = None
        elif language is None:
            blocks.append((number, "prose", line))
        else:
            lines.append(line)
    return blocks if language is None else [*blocks, (start, "open", "")]


def list_checks(start, language, text, own_recipes, scripts):
    """Yield (line, check) for a block that is not YAML."""
    match language:
        case "bash":
            lines = re.findall(r"(?:\\\n|.)*\n", text)  # a command with its continuation lines
            numbers = itertools.accumulate((line.count("\n") for line in lines), initial=start + 1)
            for number, line in zip(numbers, lines, strict=False):
                yield number, partial(block_checks.check_line, line.replace("\\\n", ""), own_recipes, scripts)
        case "python":
            yield start, partial(block_checks.check_python, text)
        case "json":
            yield start, partial(json.loads, text)
        case "prose":
            yield start, partial(block_checks.check_prose, text)
        case _ if language != "text":
            yield start, partial(reject_language, language)


def reject_language(language):
    raise UserError("the block is not closed" if language == "open" else f"unknown language {language!r}")


def find_problems(page, minimal_recipes, folder):
    """Return "LINE: REASON" for every problem of a page. `folder`: for temporary files."""
    blocks, files, problems = read_blocks(page.read_text()), {"whole": [], "fragment": [], "service": []}, []

    def run_check(start, check, file=None):
        try:
            return check()
        except SyntaxError as error:
            problems.append((start + error.lineno, error.msg))
        except (UserError, ValueError) as error:
            for reason in str(error).splitlines():
                place = re.match(rf"{file}(?::(\d+))?: (.*)", reason)
                problems.append((start + int(place[1] or 0), place[2]) if place else (start, reason))
        return None

    for start, _, text in [block for block in blocks if block[1] == "yaml"]:
        file = folder / f"{start}.yaml"
        kind = run_check(start, partial(block_checks.check_yaml, text, file, minimal_recipes), file)
        files.get(kind, []).append(file)
    own_recipes = files["whole"] or files["fragment"] + minimal_recipes
    scripts = {text.split("\n")[0].removeprefix("# ") for _, language, text in blocks if language == "python"}
    for start, language, text in [block for block in blocks if block[1] != "yaml"]:
        for line, check in list_checks(start, language, text, own_recipes, scripts):
            run_check(line, check)
    return [f"{line}: {reason}" for line, reason in sorted(problems)]


@pytest.fixture(scope="module")
def minimal_recipes(tmp_path_factory):
    return block_checks.write_minimal_recipes(tmp_path_factory.mktemp("minimal"))


@pytest.fixture
def user_modules(tmp_path, monkeypatch):
    """Write Python blocks that start with `# NAME.py` as modules, and make them importable."""
    (tmp_path / "modules").mkdir()
    for _, language, text in itertools.chain.from_iterable(read_blocks(page.read_text()) for page in PAGES):
        if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
            (tmp_path / "modules" / name[1]).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "modules")


@pytest.mark.slow
def test_every_block_is_valid_or_marked_as_text(minimal_recipes, user_modules, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    problems = [
        f"{page.relative_to(ROOT)}:{problem}"
        for page in PAGES
        for problem in find_problems(page, minimal_recipes, tmp_path)
    ]
    assert not problems, "\n" + "\n".join(problems)


GOOD_PAGE = """
Run `wfm train RECIPE --gpus 2`, `python -m wfm_ds.train` or `make test`.

```yaml
rollout: {mode: async, spawn: 2}
algorithm: {name: diffusion_nft}
```

1. A block in a list:

    ```bash
    wfm recipes copy sd3_nft mine.yaml > log.txt && cd outputs   # a comment
    PORT=1 deepspeed --num_gpus 2 -m wfm_ds.train mine.yaml rollout.spawn=1 \\
        algorithm.kl_beta=0 'lora={rank: 8}'
    wfm train sd3_nft --tiny run.steps=4 --gpus 2
    make test ARGS="tests/recipe -k defaults"
    ```

```text
anything
```
"""
BAD_PAGES = {
    "an unknown language": ("```toml\nsteps = 1\n```", "1: unknown language 'toml'"),
    "no language": ("```\nwfm recipes\n```", "1: unknown language ''"),
    "an open block": ("text\n```bash\nwfm recipes", "2: the block is not closed"),
    "an indented command": ("Run:\n\n    wfm train mine.yaml", "3: an indented command: use a block ```bash"),
    "a wrong key": ("```yaml\nmodel: {path: a}\nengine:\n  compil: true\n```", "4: engine.compil is not a key of"),
    "a wrong value": ("```yaml\nlora: {rank: many}\n```", "2: lora.rank: expected a whole number > 0"),
    "a wrong section": ("```yaml\ntrainer: {}\nlora: {rank: 8}\n```", "2: trainer is not a section"),
    "a key of another algorithm": ("```yaml\nalgorithm: {name: sft, group_size: 2}\n```", "2: algorithm.group_size is"),
    "sections that do not fit": (
        "```yaml\nalgorithm: {name: sft}\nrollout: {prompts_per_step: 2, group_size: 2}\n```",
        "sft does not read the section rollout",
    ),
    "a whole recipe without a section": (
        "```yaml\nrun: {output_dir: a, steps: 1}\nmodel: {path: a}\ndata: {kind: folder, path: a}\n"
        "algorithm: {name: sft}\n```",
        "2: the section sampling is missing",
    ),
    "an unknown reward": ("```yaml\nreward: {functions: [{name: colour}]}\n```", "unknown reward 'colour'"),
    "a wrong service": ("```yaml\nrewards: {color: {worker: 2}}\n```", "1: rewards.color.worker is not a key"),
    "another YAML file": (
        "```yaml\nkind: Service\n```",
        "1: neither a recipe nor a configuration of the reward service",
    ),
    "no YAML": ("```yaml\nmodel: {path\n```", "1: not YAML: while parsing a flow mapping"),
    "an unknown command": (
        "```bash\nwfm trian mine.yaml\n```",
        "2: wfm trian: unknown command; did you mean wfm train?",
    ),
    "a wrong option": (
        "```bash\nwfm recipes\nwfm check mine.yaml \\\n  --ranks 2\n```",
        "3: unrecognized arguments: --ranks",
    ),
    "a missing argument": ("```bash\nwfm generate --model a\n```", "2: the following arguments are required"),
    "a wrong option of the launcher": (
        "```bash\ndeepspeed --gpus 2 -m wfm_ds.train mine.yaml\n```",
        "2: unrecognized arguments: --gpus",
    ),
    "an unknown module": ("```bash\npython -m wfm_ds.trainer\n```", "2: python -m wfm_ds.trainer: No module named"),
    "an unknown recipe": ("```bash\nwfm train recipes/sd3.yaml\n```", "2: recipes/sd3.yaml does not exist"),
    "an unknown name of a recipe": (
        "```bash\nwfm check sd3_ntf\n```",
        "2: sd3_ntf: recipe file not found; did you mean",
    ),
    "a recipe to copy": ("```bash\nwfm recipes copy sd3_ntf\n```", "2: unknown shipped recipe 'sd3_ntf'"),
    "a wrong override": ("```bash\nwfm train sd3_nft run.step=4\n```", "2: override run.step=4: run.step is not a key"),
    "a wrong override of an own recipe": (
        "```bash\nwfm train mine.yaml optimizer.lr=-1\n```",
        "2: override optimizer.lr=-1",
    ),
    "an unknown target": ("```bash\nmake tests\n```", "2: the Makefile has no target tests"),
    "an unknown variable of make": ("```bash\nmake test WHICH=a\n```", "2: the Makefile does not read WHICH=a"),
    "an unknown program": ("```bash\nls | wfm-train\n```", "2: unknown program wfm-train"),
    "an unknown script": ("```bash\npython mine.py\n```", "2: the page has no block that opens with # mine.py"),
    "an open quote": ("```bash\nwfm answer 'a\n```", "2: No closing quotation"),
    "no Python": ("```python\nimport os\nimport\n```", "3: "),
    "an unknown name": ("```python\nfrom wfm_ds import Runs\n```", "2: cannot import name 'Runs'"),
    "no JSON": ("```json\n{1}\n```", "1: Expecting property name"),
    "an unknown command in prose": ("Run `wfm trian`.", "1: wfm trian: unknown command"),
    "a wrong option in prose": ("Run `wfm train RECIPE --gpu 2`.", "1: wfm train has no option --gpu"),
    "an unknown module in prose": ("Run `python -m wfm_ds.trainer`.", "1: python -m wfm_ds.trainer: No module named"),
    "an unknown target in prose": ("Run `make tests`.", "1: the Makefile has no target tests"),
}


def test_mistakes_are_reported(minimal_recipes, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "page.md").write_text(GOOD_PAGE)
    assert find_problems(tmp_path / "page.md", minimal_recipes, tmp_path) == []
    for mistake, (text, expected) in BAD_PAGES.items():
        (tmp_path / "page.md").write_text(text)
        problems = find_problems(tmp_path / "page.md", minimal_recipes, tmp_path)
        assert len(problems) == 1, (mistake, problems)
        assert expected in problems[0], (mistake, problems)
