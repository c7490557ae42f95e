"""The `deepspeed` script: which command lines wfm_ds handles, and how doctor finds and repairs the hook.

The tests replace the script by small programs; tests/end_to_end/test_install.py uses a real environment.
"""

import os
import sys

from each_case import check_each
from wfm_ds import __version__
from wfm_ds.cli.doctor.deepspeed_script import repair_script, script_finding
from wfm_ds.distributed import hook

# -S disables site, so that the hook of the test environment does not run.
STOCK = f"#!{sys.executable} -S\nimport sys\nsys.stderr.write('unrecognized arguments')\nsys.exit(2)\n"
OURS = f"#!{sys.executable}\nprint('wfm_ds {__version__}')\n"


def script(folder, text, name="deepspeed"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder


@check_each(
    ("line", "ours"),
    [
        ("--num_gpus 8 -m wfm_ds.train r.yaml", True),
        ("--num_gpus 8 --module wfm_ds.train r.yaml", True),
        ("-m somebody.elses", True),  # DeepSpeed has no -m option
        ("--wfm-version", True),
        ("--num_gpus 8 --module somebody.elses -m", False),
        ("train.py -m wfm_ds.train", False),
        ("--num_gpus 8 train.py", False),
        ("--help", False),
        ("", False),
    ],
)
def test_command_lines_that_wfm_ds_handles(line, ours):
    assert hook.is_wfm_command(line.split()) is ours


def test_the_hook_is_one_line_that_asks_for_the_scripts_name_first():
    (line,) = hook.PTH_FILE.read_text().splitlines()
    assert line.startswith("import sys; ")
    before, _, after = line.removeprefix("import sys; ").partition(" and __import__(")
    assert after
    for argv, wanted in ((["/venv/bin/deepspeed"], True), (["/venv/bin/pytest"], False), ([], False)):
        assert bool(eval(before, {"sys": type("sys", (), {"argv": argv})})) is wanted


@check_each(
    ("text", "level", "says"),
    [(OURS, "ok", "supports -m"), (STOCK, "warning", "does not support -m"), ("no program", "warning", "does not run")],
)
def test_the_script_is_found_and_checked(tmp_path, text, level, says):
    found = script_finding(script(tmp_path / "bin", text))
    assert found.level == level
    assert says in found.text


def test_a_missing_script_is_reported(tmp_path):
    found = script_finding(tmp_path)
    assert (found.level, found.text) == ("warning", f"{tmp_path / 'deepspeed'} does not exist")


def test_repair_restores_missing_files_once(tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    scripts = script(tmp_path / "bin", STOCK, "deepspeed.pt")
    assert list(repair_script(scripts, packages)) == [
        f"wrote {packages / hook.PTH_FILE.name}",
        f"wrote {scripts / 'deepspeed'}, which was missing",
    ]
    assert (scripts / "deepspeed").read_text() == STOCK
    assert os.access(scripts / "deepspeed", os.X_OK)
    assert (packages / hook.PTH_FILE.name).read_bytes() == hook.PTH_FILE.read_bytes()
    assert list(repair_script(scripts, packages)) == []


def test_without_a_twin_the_way_out_is_named(tmp_path):
    assert list(repair_script(tmp_path, tmp_path))[1:] == [
        f"{tmp_path / 'deepspeed'} is missing: pip install --force-reinstall --no-deps deepspeed"
    ]
