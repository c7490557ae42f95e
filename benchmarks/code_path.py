"""Count the files and the stack depth of one training step and of the set-up before it.

    python -m benchmarks.code_path tests/recipes/sd3_nft.yaml

Runs the recipe for two steps in this process and traces the Python calls. Prints, for the set-up (everything before
the first step) and for `train_step` of the second step: the number of project files with a called function, and the
largest number of project frames on the stack, counted from `main` or from `train_step`. The import of a module is not
a call.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import wfm_ds
import wfm_kernels
import wfm_reward

ROOT = Path(__file__).parent.parent
PRODUCT = tuple(f"{Path(str(package.__file__)).parent}/" for package in (wfm_ds, wfm_kernels, wfm_reward))


class CallTrace:
    """Files of the project with called functions, and the largest number of nested calls of project functions."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.deepest: list[str] = []
        self._outer: FrameType | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of this thread, and the files of threads that start in this block."""
        self._outer = sys._getframe(2)  # the caller; 1 is contextlib
        previous = sys.getprofile()
        threading.setprofile(self._record_file)
        sys.setprofile(self._record_call)
        try:
            yield
        finally:
            sys.setprofile(previous)
            threading.setprofile(None)

    def _record_file(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (stack := self._project_stack(frame)):
            self.files.add(stack[-1].f_code.co_filename)

    def _record_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (stack := self._project_stack(frame)):
            self.files.add(stack[-1].f_code.co_filename)
            if len(stack) > len(self.deepest):
                self.deepest = [f"{Path(f.f_code.co_filename).stem}.{f.f_code.co_qualname}" for f in stack]

    def _project_stack(self, frame: FrameType) -> list[FrameType]:
        """Return the project frames from `recording` to this one. Empty for other code and during an import."""
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return []
        stack: list[FrameType] = []
        at: FrameType | None = frame
        while at is not None and at is not self._outer:
            if at.f_code.co_filename.startswith(PRODUCT):
                if at.f_code.co_name == "<module>":
                    return []
                stack.append(at)
            at = at.f_back
        return stack[::-1]


def trace_recipe(recipe: str, overrides: list[str]) -> tuple[CallTrace, CallTrace]:
    """Return the traces of the set-up and of the second step of a recipe."""
    from wfm_ds import train
    from wfm_ds.training import language_loop, rl, sft

    setup, step, classes = CallTrace(), CallTrace(), (rl.RlLoop, sft.SftLoop, language_loop.LanguageLoop)
    originals: dict[Any, Any] = {loop: loop.train_step for loop in classes}

    def traced_train_step(loop: Any, number: int) -> Any:
        sys.setprofile(None)  # the end of the set-up
        threading.setprofile(None)
        if number == 1:  # the first step may still load and compile
            return originals[type(loop)](loop, number)
        with step.recording():
            return originals[type(loop)](loop, number)

    for loop in originals:
        loop.train_step = traced_train_step
    try:
        with tempfile.TemporaryDirectory() as folder, setup.recording():
            short = ["run.steps=2", f"run.output_dir={folder}/run", "checkpoint.every=0", "validation.every=0"]
            train.main([recipe, *short, *overrides])
    finally:
        for loop, original in originals.items():
            loop.train_step = original
    return setup, step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--files", action="store_true", help="print the names of the files and the deepest stack")
    args = parser.parse_args()
    lines = []
    for name, trace in zip(("set-up", "step"), trace_recipe(args.recipe, args.overrides), strict=True):
        lines.append(f"{args.recipe} {name}: {len(trace.files)} files, {len(trace.deepest)} frames deep")
        if args.files:
            lines += [f"  {os.path.relpath(file, ROOT)}" for file in sorted(trace.files)]
            lines += ["  deepest:", *(f"    {call}" for call in trace.deepest)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
