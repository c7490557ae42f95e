"""The commands import user-defined classes from the working directory. The classes are the examples in the docs."""

import json
import os
import re
import subprocess
import sys

import pytest
from PIL import Image

from commands import CODE_PATH, ROOT, run_module
from lumina import tiny_lumina
from pages import table_rows, write_code

DEADLINE_S = 240


def train(folder, recipe, *overrides, code=0):
    """Run the training command in `folder`, which has the user's modules."""
    return run_module("wfm_ds.train", ROOT / "tests" / "recipes" / recipe, *overrides, cwd=folder, code=code)


@pytest.fixture
def wfm(tmp_path):
    """Run the command `wfm` in a folder with the user's modules. Its script is in another folder, as when installed."""
    script = tmp_path / "bin" / "wfm"
    script.parent.mkdir()
    script.write_text("import sys\nfrom wfm_ds.cli.main import main\nsys.exit(main())\n")
    folder = tmp_path / "here"
    folder.mkdir()

    def run(*words):
        done = subprocess.run(
            [sys.executable, str(script), *map(str, words)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": CODE_PATH},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.folder = folder
    return run


def test_wfm_imports_a_reward_from_the_current_folder(wfm):
    write_code("own_reward.md", "my_rewards.py", wfm.folder)
    assert wfm("rewards", "my_rewards:Brightness").startswith("mean_brightness\n  scores     image\n")
    assert wfm("rewards", "my_rewards:Brightness/dark") == wfm("rewards", "my_rewards:Brightness")


@pytest.mark.long
def test_wfm_trains_with_an_algorithm_and_two_uses_of_a_reward_in_the_current_folder(wfm):
    """The launcher, the ranks, the rollout worker and the reward service with its workers import both classes."""
    write_code("own_algorithm.md", "my_algorithm.py", wfm.folder)
    write_code("own_reward.md", "my_rewards.py", wfm.folder)
    words = ["run.output_dir=out", f"data.path={ROOT / 'recipes/prompts/colors'}"]
    words += ["algorithm.name=my_algorithm:RewardWeighted", "algorithm.temperature=0.5"]
    rewards = [{"name": "my_rewards:Brightness"}, {"name": "my_rewards:Brightness/dark", "options": {"target": 0.0}}]
    words += [f"reward.functions={json.dumps(rewards)}"]
    wfm("train", ROOT / "tests" / "recipes" / "sd3_nft_async.yaml", *words)
    lines = metrics(wfm.folder / "out")
    (line, *_) = (line for line in lines if "reward/total/mean" in line)
    means = [line[f"reward/my_rewards:Brightness{label}/mean"] for label in ("", "/dark")]
    assert sum(means) == pytest.approx(1.0)
    factors = [line["weighted/factor"] for line in lines if "weighted/factor" in line]
    assert len(factors) > 1
    assert all(factor > 0 for factor in factors)
    assert (wfm.folder / "out" / "rollout" / "spawned-0.log").exists()


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RECORDER = """
from pathlib import Path

import torch
from my_algorithm import RewardWeighted


class Recorder(RewardWeighted):
    uses_group_statistics = True
    area = "recorder"

    def group_statistics(self, terms, velocity, batch, references):
        return ["all"] * len(terms), torch.ones_like(batch.weight)

    def __getattribute__(self, name):
        member = super().__getattribute__(name)
        if callable(member) and not name.startswith("_"):
            with Path("calls.txt").open("a") as calls:
                calls.write(name + "\\n")
        return member
"""


@pytest.mark.slow
def test_the_trainer_calls_the_methods_in_the_order_of_the_page(tmp_path):
    write_code("own_algorithm.md", "my_algorithm.py", tmp_path)
    (tmp_path / "my_recorder.py").write_text(RECORDER)
    words = ["run.output_dir=out", f"data.path={ROOT / 'recipes/prompts/colors'}", "run.steps=1", "validation.every=0"]
    train(tmp_path, "sd3_nft.yaml", *words, "algorithm.name=my_recorder:Recorder")
    page = [re.match(r"`(\w+)", cells[0])[1] for cells in table_rows("own_algorithm.md", "| call | returns |")]
    calls = [name for name in (tmp_path / "calls.txt").read_text().split() if name in page]
    start = len(calls) - calls[::-1].index("compute_advantages") - 1  # `wfm check` calls `plan` before the RL step
    assert calls[start - 1] == "plan"
    assert list(dict.fromkeys(calls[start - 1 :])) == page


def write_family_and_data(folder):
    """Write a family and a data kind with media to the folder. Return the overrides of a run there."""
    write_code("own_model.md", "my_lumina.py", folder)
    write_code("data_layouts.md", "my_data.py", folder)
    tiny_lumina().save_pretrained(folder / "pipeline")
    media = folder / "media"
    media.mkdir()
    for i in range(8):
        Image.new("RGB", (32, 32), (30 * i, 0, 0)).save(media / f"{i}.png")
    (media / "captions.csv").write_text("file,caption\n" + "\n".join(f"{i}.png,red {i}" for i in range(8)))
    words = ["run.output_dir=out", "run.steps=2", "model.path=pipeline", "model.family=my_lumina:Lumina2"]
    return [*words, "data.kind=my_data:CaptionTable", "data.path=media", "sampling.height=32", "sampling.width=32"]


@pytest.mark.slow
def test_wfm_checks_and_trains_a_family_and_a_data_kind_in_the_current_folder(wfm):
    words = [ROOT / "tests" / "recipes" / "sd3_sft_lora.yaml", *write_family_and_data(wfm.folder)]
    assert "all checks passed" in wfm("check", *words)
    wfm("train", *words)
    assert [line["step"] for line in metrics(wfm.folder / "out")][-1] == 2
    assert list((wfm.folder / "out" / "safetensors").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise OSError('no disk today')", "importing 'mine' failed in "),
        ("class Mine:\n    pass", "the class needs an attribute Settings, a subclass of RlSettings"),
    ],
)
def test_errors_in_user_classes_are_one_line_with_exit_code_2(tmp_path, module, says):
    (tmp_path / "mine.py").write_text(module)
    process = train(tmp_path, "sd3_nft.yaml", "algorithm.name=mine:Mine", code=2)
    [line] = process.stderr.strip().splitlines()
    assert line.startswith("error: override algorithm.name=mine:Mine: algorithm.name mine:Mine: ")
    assert says in line
