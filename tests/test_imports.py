"""Every module of the project can be imported, with this Python and these versions of torch and transformers."""

import json
import subprocess
import sys

import pytest

CODE = """
import importlib, json, pkgutil
failed, count = {}, 0
for package in ("wfm_ds", "wfm_reward", "wfm_kernels", "benchmarks"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if found.name.endswith("__main__"):
            continue
        count += 1
        try:
            importlib.import_module(found.name)
        except Exception as error:
            failed[found.name] = f"{type(error).__name__}: {error}"
print(json.dumps([count, failed]))
"""


@pytest.mark.slow
def test_every_module_can_be_imported(root):
    environment_path = [root, root / "kernels", root / "reward"]
    code = f"import sys; sys.path[:0] = {list(map(str, environment_path))!r}\n{CODE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    count, failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == {}
    assert count > 500
