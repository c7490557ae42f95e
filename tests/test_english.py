"""Plain English: a docstring opens with an imperative or a noun phrase, not with a fragment."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ["wfm_ds", "kernels/wfm_kernels", "reward/wfm_reward", "benchmarks"]
FRAGMENTS = {"Of", "By", "Those", "Whether", "As", "What", "How", "Who", "Where", "When", "Which"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments():
    """The place of each docstring that opens with a fragment."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and text.split()[0] in FRAGMENTS:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    assert list(fragments()) == []
