"""Run the commands of docs/async.md for a second machine, in order. Two folders take the place of the machines."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from pages import DOCS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300
POLL_S = 0.2
# Replacements for what only the page's machines have. The tiny recipe has other rewards.
REPLACEMENTS = {"10.0.0.5": "127.0.0.1", "cuda:0": "cpu", "/models/sd35": "tiny:sd3", "ocr": "color"}


def free_ports():
    """Return a free port, and a free port whose next port is free too."""
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        while True:
            pair = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", pair + 1)))
            except OSError:
                continue
            return first, pair


def read_section(folder):
    """Return (language, lines) of the section's blocks, with the values of this machine."""
    section = re.search(r"## Use a second machine\n(.*?)\n## ", (DOCS / "async.md").read_text(), re.DOTALL)[1]
    service, trainer = free_ports()
    replaced = REPLACEMENTS | {"6100": str(service), "6200": str(trainer), "machineA:/srv/run": str(folder / "A")}
    for old, new in replaced.items():
        assert old in section
        section = section.replace(old, new)
    return [(language, text.splitlines()) for language, text in re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)]


def wait_until(condition, processes):
    """Wait for the condition. Fails as soon as one of the processes (process, log) has ended with an error."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        failed = [log.read_text() for process, log in processes if process.poll()]
        assert not failed, failed[0]
        assert time.monotonic() < end, [log.read_text()[-2000:] for _, log in processes]
        time.sleep(POLL_S)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts one of our programs in a folder. The programs end with the test."""
    with ExitStack() as stack:

        def run(words, folder):
            log = tmp_path / f"{folder.name}-{words[1]}.log"
            modules = {"wfm": ["-m", "wfm_ds"], "deepspeed": []}
            arguments = words[words.index("-m") :] if words[0] == "deepspeed" else words[1:]
            process = subprocess.Popen(
                [sys.executable, *modules[words[0]], *arguments],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'reward'}"},
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process, log

        yield run


def test_the_commands_of_the_page_train_with_a_worker_on_the_other_machine(start, tmp_path):
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
    configs, started = [], {}

    def has_ended(name):
        return started[name][0].poll() == 0

    ready = {
        "keys": lambda: has_ended("keys"),
        "serve": (tmp_path / "A" / "pipes.json").exists,
        "--num_gpus": (tmp_path / "A" / "outputs" / "my_run" / "rollout" / "pipes.json").exists,
        "rollout": lambda: has_ended("--num_gpus") and has_ended("rollout"),
    }
    for language, lines in read_section(tmp_path):
        if language == "yaml":
            configs.append(yaml.safe_load("\n".join(lines)))
            continue
        folder = tmp_path / lines[0].removeprefix("# machine ")
        for words in map(shlex.split, lines[1:]):
            if words[0] == "scp":
                shutil.copy(folder / words[1], folder / words[2])
                continue
            if words[:2] == ["wfm", "serve"]:
                (folder / "reward.yaml").write_text(yaml.safe_dump(configs[0]))
            if words[0] == "deepspeed":
                write_recipe(folder / "my_recipe.yaml", configs[1])
            started[words[1]] = start(words, folder)
            wait_until(ready[words[1]], started.values())
    assert json.loads((tmp_path / "A" / "outputs" / "my_run" / "result.json").read_text())["status"] == "finished"
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.glob("?/keys/**/*.key*")) == [
        "A/keys/hub.key_secret",
        "A/keys/public/hub.key",
        "A/keys/public/machineB.key",
        "B/keys/machineB.key_secret",
        "B/keys/public/hub.key",
        "B/keys/public/machineB.key",
    ]


def write_recipe(file, sections):
    """Write a tiny recipe with the sections of the page."""
    base = yaml.safe_load((ROOT / "tests" / "recipes" / "sd3_nft_async.yaml").read_text())
    recipe = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    recipe["data"]["path"] = str(ROOT / recipe["data"]["path"])
    file.write_text(yaml.safe_dump(recipe))
