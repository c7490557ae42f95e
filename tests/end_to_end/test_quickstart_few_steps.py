"""The few-step demo, as run by `make quickstart-fewstep`."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from each_case import check_each
from wfm_ds.cli import quickstart
from wfm_ds.cli.main import main
from wfm_ds.cli.quickstart import prepare_folder, run_few_steps, run_rl, run_sft
from wfm_ds.demos import few_steps
from wfm_ds.demos.base import load_evaluations
from wfm_ds.demos.digits import load_samples


@check_each(
    ("options", "message"),
    [
        (["--demo", "fewstep", "--rl", "nft"], "--rl does not work with --demo fewstep"),
        (["--demo", "fewstep", "--control"], "--control does not work with --demo fewstep"),
        (["--start", "here"], "--start is only for --demo fewstep"),
        (["--demo", "fewstep", "--start", "out/digits"], "--output out would replace the digits quickstart out/digits"),
        (["--demo", "fewstep", "--start", "out"], "--output out would replace the digits quickstart out"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(
    options, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", *options, "--output", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_start_without_a_finished_nft_run_is_refused_before_anything_is_emptied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept = [Path(name) for name in ("start/flow_grpo/result.json", "start/nft/recipe.yaml", "few/report.md")]
    for file in (*kept, Path("start", quickstart.MARKER_FILE), Path("few", quickstart.MARKER_FILE)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert main(["quickstart", "--demo", "fewstep", "--start", "start", "--output", "few"]) == 2
    assert "--start start has no finished run nft" in capsys.readouterr().err
    assert all(file.exists() for file in kept)


@pytest.mark.slow
@pytest.mark.long
def test_the_digits_are_distilled_and_diffusers_generates_the_validation_images(tmp_path, root, monkeypatch):
    """Run a few steps of everything. benchmarks/learning/fewstep.py measures the full demo."""
    monkeypatch.chdir(root)
    start, folder, seeds = tmp_path / "start", tmp_path / "few", [1, 2]
    few = (f"validation.seeds={seeds}",)

    def run_short_demo(demo, output, rl_recipes, seed):
        prepare_folder(demo, output)
        sft_result = run_sft(demo, output, output / "sft", seed, "run.steps=4", *few)
        for name in rl_recipes:
            run_rl(demo, output, output / name, sft_result, seed, "run.steps=1", "algorithm.zero_std=keep", *few)

    monkeypatch.setattr(quickstart, "run_demo", run_short_demo)
    short = ("run.steps=2", "algorithm.fake.warmup_steps=1", *few)
    runs = {name: (recipe, (*overrides, *short)) for name, (recipe, overrides) in few_steps.RUNS.items()}
    monkeypatch.setattr(few_steps, "RUNS", runs)
    run_few_steps(folder, start, 0)

    report = (folder / "report.md").read_text()
    assert len(re.findall(r"\| .* step.* \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| \d* \|", report)) == 6
    assert (folder / "index.html").read_text().count("<img") == 6
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("\n".join(re.findall(r"^    (.*)", report, re.MULTILINE)), names)
    assert (tmp_path / "digit.png").exists()

    samples_folder, _ = load_evaluations(folder / "dmd2", "val/held_out/digits/mean")[-1]
    samples = load_samples(samples_folder)
    assert len(samples) == 10 * len(seeds)
    for k, (image, prompt) in enumerate(samples):
        generator = torch.Generator("cpu").manual_seed(seeds[k // 10])
        call = names["call"] | {"prompt": prompt, "generator": generator, "output_type": "np"}
        drawn = names["pipe"](**call).images[0]
        np.testing.assert_allclose(255 * drawn, image, rtol=0, atol=1)  # half a grey level for each rounding
