"""pip installs the command, the recipes and the hook for DeepSpeed's script, as a wheel and editable.

Uninstalling removes everything. The test uses a new virtual environment that imports this environment's libraries.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from wfm_ds import __version__

ROOT = Path(__file__).parent.parent.parent
STOCK = "from deepspeed.launcher.runner import main\n\nif __name__ == '__main__':\n    main()\n"  # DeepSpeed's script
INSTALL = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]


def run(*words, cwd):
    """Run a command with only PATH and HOME of this environment. Return its output. Fails on a nonzero exit code."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def venv(tmp_path):
    folder = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    write_stock(folder)
    return folder, packages


def write_stock(venv):
    for name in ("deepspeed", "deepspeed.pt"):
        (venv / "bin" / name).write_text(f"#!{venv / 'bin' / 'python'}\n{STOCK}")
        (venv / "bin" / name).chmod(0o755)


def sources(folder):
    """Copy the sources of a wheel, because the build writes into the source folder."""
    for name in ("backend", "ds_configs", "kernels", "recipes", "reward", "wfm_ds"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-e"]], ids=["wheel", "editable"])
def test_an_installation_works_in_an_empty_folder_and_uninstalling_restores_deepspeed(options, venv, tmp_path):
    folder, packages = venv
    before = {path.name for path in (folder / "bin").iterdir()} | {path.name for path in packages.iterdir()}
    python, script, wfm = (str(folder / "bin" / name) for name in ("python", "deepspeed", "wfm"))
    (tmp_path / "sources").mkdir()
    run(python, *INSTALL, *options, str(sources(tmp_path / "sources")), cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()

    version = f"wfm_ds {__version__}\n"
    assert run(wfm, "--version", cwd=empty) == version
    assert run(script, "--wfm-version", cwd=empty) == version
    assert "wfm_ds.train" in run(script, "--num_gpus", "2", "-m", "wfm_ds.train", "--help", cwd=empty)
    assert "digits/nft" in run(wfm, "recipes", cwd=empty)
    shipped = run(
        python,
        "-c",
        "from wfm_ds.recipe import shipped_recipes; print(shipped_recipes.require_recipe('digits/sft'))",
        cwd=empty,
    )
    assert Path(shipped.strip()).is_relative_to(packages if not options else tmp_path / "sources")
    run(wfm, "recipes", "copy", "sd3_nft", "mine.yaml", cwd=empty)
    assert "--module wfm_ds.train mine.yaml" in run(wfm, "train", "mine.yaml", "--dry-run", cwd=empty)

    write_stock(folder)  # as if DeepSpeed were reinstalled after wfm_ds
    assert run(script, "--wfm-version", cwd=empty) == version
    (packages / "wfm_ds_deepspeed.pth").unlink()
    (folder / "bin" / "deepspeed").unlink()
    assert run(wfm, "doctor", "--fix", cwd=empty).splitlines()[-1] == f"{script} supports -m"

    run(python, "-m", "pip", "uninstall", "-q", "-y", "wfm_ds", cwd=empty)
    after = {path.name for path in (folder / "bin").iterdir()} | {path.name for path in packages.iterdir()}
    assert after - {"__pycache__"} == before
    assert STOCK in (folder / "bin" / "deepspeed").read_text()
