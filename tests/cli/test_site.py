"""The docs site: the hook alone, and a full build, which checks all links."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def hook(root):
    spec = importlib.util.spec_from_file_location("site_pages", root / "backend" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_and_notebook_become_pages(hook, root):
    assert hook.convert_readme("[a](docs/data.md#x) ![](docs/images/y.png) [b](recipes/z.yaml) [c](https://d.e)") == (
        "[a](data.md#x) ![](images/y.png) [b](../recipes/z.yaml) [c](https://d.e)"
    )
    cell = {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]}
    assert hook.convert_notebook({"cells": [cell]}) == "```python\n1 + 1\n```\n\n```text\n2\n```\n"
    for page in (root / "docs").rglob("*.md"):
        for link in hook.OUTSIDE.finditer(page.read_text()):
            assert (page.parent / ".." / link["path"]).exists(), f"{page}: {link[0]}"


def test_links_of_pages_in_folders(hook):
    pytest.importorskip("mkdocs")
    page = SimpleNamespace(file=SimpleNamespace(src_path="models/wan.md"))
    text = "[data](../data.md#x) [a recipe](../../recipes/wan_nft.yaml)"
    expected = "[data](../data.md#x) a recipe (`recipes/wan_nft.yaml`)"
    assert hook.on_page_markdown(text, page, None, None) == expected


@pytest.mark.slow
def test_the_site_builds_without_a_warning(root, tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from_recipe" in (tmp_path / "site" / "api" / "index.html").read_text()
