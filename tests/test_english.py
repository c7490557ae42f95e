"""Plain English: a docstring opens with an imperative or a noun phrase, not with a fragment."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ["wfm_ds", "kernels/wfm_kernels", "reward/wfm_reward", "benchmarks"]
FRAGMENTS = {"Of", "By", "Those", "Whether", "As", "What"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOT_YET = {
    # room: how many are left; a room leaves the list when it has none
    "benchmarks": 26,
    "wfm_ds/algorithms": 8,
    "wfm_ds/checkpoint": 1,
    "wfm_ds/data": 14,
    "wfm_ds/engine": 2,
    "wfm_ds/models": 2,
    "wfm_ds/recipe": 9,
    "wfm_ds/rollout": 5,
    "wfm_ds/run": 19,
    "wfm_ds/storage": 2,
    "wfm_ds/training": 13,
}


def room_of(path):
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] in ("wfm_ds", "reward", "kernels") else parts[0]


def fragments():
    """(room, place) of each docstring that opens with a fragment."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and text.split()[0] in FRAGMENTS:
                yield room_of(path), f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    found = list(fragments())
    counts = Counter(room for room, _ in found)
    assert [place for room, place in found if counts[room] > NOT_YET.get(room, 0)] == []
