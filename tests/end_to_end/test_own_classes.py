"""Classes of the user's own through the command: the files of the pages, beside the working directory's recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lumina import tiny_lumina
from pages import write_code

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 240


def train(folder, recipe, *overrides):
    """The command, run in `folder`, which holds the user's modules."""
    return subprocess.run(
        [sys.executable, "-m", "wfm_ds.train", str(ROOT / "tests" / "recipes" / recipe), *overrides],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'reward'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture
def wfm(tmp_path):
    """Runs the command `wfm` in a folder with the user's modules. As in an installation, it is a script elsewhere."""
    script = tmp_path / "bin" / "wfm"
    script.parent.mkdir()
    script.write_text("import sys\nfrom wfm_ds.cli.main import main\nsys.exit(main())\n")
    folder = tmp_path / "here"
    folder.mkdir()

    def run(*words):
        done = subprocess.run(
            [sys.executable, str(script), *map(str, words)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'reward'}"},
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


@pytest.mark.slow
def test_wfm_checks_a_family_in_the_current_folder(wfm):
    write_code("own_model.md", "my_lumina.py", wfm.folder)
    tiny_lumina().save_pretrained(wfm.folder / "pipeline")
    assert "checks passed" in wfm("models", "check", "my_lumina:Lumina2", "--tiny", "pipeline")


@pytest.mark.slow
def test_wfm_trains_with_an_algorithm_and_two_uses_of_a_reward_in_the_current_folder(wfm):
    """The launcher, the ranks, the rollout worker, and the reward service with its workers import them."""
    write_code("own_algorithm.md", "my_algorithm.py", wfm.folder)
    write_code("own_reward.md", "my_rewards.py", wfm.folder)
    words = ["run.output_dir=out", f"data.path={ROOT / 'recipes/prompts/colors'}"]
    words += ["algorithm.name=my_algorithm:RewardWeighted", "algorithm.temperature=0.5"]
    rewards = [{"name": "my_rewards:Brightness"}, {"name": "my_rewards:Brightness/dark", "options": {"target": 0.0}}]
    words += [f"reward.functions={json.dumps(rewards)}"]
    wfm("train", ROOT / "tests" / "recipes" / "sd3_nft_async.yaml", *words)
    (line, *_) = (line for line in metrics(wfm.folder / "out") if "reward/total/mean" in line)
    means = [line[f"reward/my_rewards:Brightness{label}/mean"] for label in ("", "/dark")]
    assert sum(means) == pytest.approx(1.0)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_algorithm_of_ones_own_trains_on_rollouts_of_a_worker(tmp_path):
    write_code("own_algorithm.md", "my_algorithm.py", tmp_path)
    words = ["run.output_dir=out", f"data.path={ROOT / 'recipes/prompts/colors'}"]
    words += ["algorithm.name=my_algorithm:RewardWeighted", "algorithm.temperature=0.5"]
    process = train(tmp_path, "sd3_nft_async.yaml", *words)
    assert process.returncode == 0, process.stdout + process.stderr
    factors = [line["weighted/factor"] for line in metrics(tmp_path / "out") if "weighted/factor" in line]
    assert len(factors) > 1
    assert all(factor > 0 for factor in factors)
    assert (tmp_path / "out" / "rollout" / "spawned-0.log").exists()


@pytest.mark.slow
def test_a_family_and_a_kind_of_data_of_ones_own_train(tmp_path):
    write_code("own_model.md", "my_lumina.py", tmp_path)
    write_code("data_layouts.md", "my_data.py", tmp_path)
    tiny_lumina().save_pretrained(tmp_path / "pipeline")
    media = tmp_path / "media"
    media.mkdir()
    for i in range(8):
        Image.new("RGB", (32, 32), (30 * i, 0, 0)).save(media / f"{i}.png")
    (media / "captions.csv").write_text("file,caption\n" + "\n".join(f"{i}.png,red {i}" for i in range(8)))
    words = ["run.output_dir=out", "run.steps=2", "model.path=pipeline", "model.family=my_lumina:Lumina2"]
    words += ["data.kind=my_data:CaptionTable", f"data.path={media}", "sampling.height=32", "sampling.width=32"]
    process = train(tmp_path, "sd3_sft_lora.yaml", *words)
    assert process.returncode == 0, process.stdout + process.stderr
    assert [line["step"] for line in metrics(tmp_path / "out")][-1] == 2
    assert list((tmp_path / "out" / "safetensors").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise OSError('no disk today')", "importing 'mine' failed in "),
        ("class Mine:\n    pass", "the class needs an attribute Settings, a subclass of RlSettings"),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence_and_exit_code_2(tmp_path, module, says):
    (tmp_path / "mine.py").write_text(module)
    process = train(tmp_path, "sd3_nft.yaml", "algorithm.name=mine:Mine")
    assert process.returncode == 2
    [line] = process.stderr.strip().splitlines()
    assert line.startswith("error: override algorithm.name=mine:Mine: algorithm.name mine:Mine: ")
    assert says in line
