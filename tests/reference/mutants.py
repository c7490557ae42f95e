"""One-line wiring bugs in callers, and the test that fails for each: `python tests/reference/mutants.py`.

    python tests/reference/mutants.py                 # all
    python tests/reference/mutants.py ema_decay ...   # some
    python tests/reference/mutants.py --table         # as Markdown, without running anything

mutants.yaml lists them. Each bug is inserted into a copy of the repository, and its test must fail there.
`test_mutants.py` checks that each line still exists.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
COPIED = ("wfm_ds", "kernels", "reward", "tests", "recipes", "ds_configs", "benchmarks", "pyproject.toml")
TESTS_FAILED = 1  # exit code of pytest


@dataclass(frozen=True)
class Mutant:
    """A bug: `old`, which occurs in one file of wfm_ds, is replaced by `new`. `test`: the test that must fail."""

    name: str
    old: str
    new: str
    test: str

    @property
    def tier(self) -> str:
        """The tier of the test: default or slow."""
        file, _, name = self.test.partition("::")
        text = (Path(__file__).parent / file).read_text()
        return "default" if "_rank" not in text or f"unit\ndef {name}(" in text else "slow"  # tests/conftest.py

    def find_file(self, root: Path = ROOT) -> Path:
        """Return the file, relative to the root. Raises ValueError unless exactly one file contains the text once."""
        texts = {file: file.read_text() for file in sorted((root / "wfm_ds").rglob("*.py"))}
        found = [file for file, text in texts.items() if self.old in text]
        if len(found) != 1 or texts[found[0]].count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is in {[str(file) for file in found]}; update the mutant")
        return found[0].relative_to(root)


MUTANTS = [Mutant(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, target / name)


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Return whether the mutant's test fails in the copy. Raises RuntimeError if the test cannot run."""
    file = copy / mutant.find_file()
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    paths = os.pathsep.join(str(copy / part) for part in ("", "kernels", "reward"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, str(copy / "tests" / "reference" / mutant.test)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(original)
    if run.returncode not in (0, TESTS_FAILED):
        raise RuntimeError(f"{mutant.name}: pytest ended with {run.returncode}: {run.stdout[-2000:]}")
    return run.returncode == TESTS_FAILED


def format_table() -> str:
    """Return the mutants as a Markdown table."""
    rows = ["| bug | file | line | becomes | test (tests/reference/) | tier |", "|---|---|---|---|---|---|"]
    for m in MUTANTS:
        old, new = (" ".join(text.split()).replace("|", "\\|") for text in (m.old, m.new))
        rows.append(f"| {m.name} | {m.find_file()} | `{old}` | `{new}` | {m.test} | {m.tier} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that each mutant is found by its test.")
    parser.add_argument("names", nargs="*", help="mutants; default: all")
    parser.add_argument("--table", action="store_true", help="print the mutants as Markdown")
    options = parser.parse_args()
    if options.table:
        sys.stdout.write(format_table() + "\n")
        return 0
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for mutant in chosen:
            killed = is_killed(mutant, Path(folder))
            sys.stdout.write(f"{'killed' if killed else 'ALIVE'}  {mutant.name}  {mutant.test}\n")
            sys.stdout.flush()
            alive += [] if killed else [mutant.name]
    sys.stdout.write(f"{len(chosen) - len(alive)} of {len(chosen)} killed\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
