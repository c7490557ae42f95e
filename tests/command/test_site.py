"""The site of docs/: its hook by itself, and the whole build, which checks every link."""

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def hook(root):
    spec = importlib.util.spec_from_file_location("site_pages", root / "backend" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_that_stand_elsewhere(hook, root):
    assert hook.of_readme("[a](docs/data.md#x) ![](docs/images/y.png) [b](recipes/z.yaml) [c](https://d.e)") == (
        "[a](data.md#x) ![](images/y.png) [b](../recipes/z.yaml) [c](https://d.e)"
    )
    cell = {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]}
    assert hook.of_notebook({"cells": [cell]}) == "```python\n1 + 1\n```\n\n```text\n2\n```\n"
    for link in hook.OUTSIDE.finditer("\n".join(page.read_text() for page in (root / "docs").glob("*.md"))):
        assert (root / link["path"]).exists(), link[0]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(root, tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from_recipe" in (tmp_path / "site" / "api" / "index.html").read_text()
