"""The report of the few-step demo: the evaluations that it compares, diversity, and cost."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from wfm_ds.demos.digits_data import digit_caption
from wfm_ds.demos.few_steps import MODELS, RUNS, read_result, start_overrides, write_report
from wfm_ds.demos.files import write_json_rows

STEPS = 3


def write_run(run, kind, results, *, cost=0.0):
    """Write a run's files. results: (fraction, grey level of half of the images) of its first and last evaluation."""
    lines = [{"step": 1, "perf/forward_samples_fake_policy": cost, "perf/forward_samples_validation": 9e9}]
    for step, (value, grey) in zip((0, STEPS), results, strict=True):
        samples = run / "samples" / f"step_{step}"
        samples.mkdir(parents=True)
        entries = []
        for k in range(40):
            Image.fromarray(np.full((8, 8, 3), grey * (k % 20 < 10), np.uint8)).save(samples / f"{k}.png")
            entries.append({"file": f"{k}.png", **digit_caption(k % 10)})
        write_json_rows(samples / "samples.jsonl", entries)
        tag = f"val/{kind}/digits"
        lines.append({"step": step, f"{tag}/mean": value, f"{tag}/second_judge/mean": value / 2})
    write_json_rows(run / "metrics.jsonl", lines)
    (run / "result.json").write_text(json.dumps({"step": STEPS}))
    (run / "logs").mkdir()
    for rank in range(2):
        (run / "logs" / f"rank_{rank}.log").touch()


@pytest.fixture
def demo(tmp_path):
    start, folder = tmp_path / "start", tmp_path / "few"
    write_run(start / "nft", "reward", [(0.1, 0), (0.9, 204)])
    (start / "sft").mkdir()
    (start / "sft" / "result.json").write_text(json.dumps({"step": STEPS}))
    for k, name in enumerate(RUNS):
        write_run(folder / name, "held_out", [(0.2 + 0.1 * k, 51), (0.5 + 0.1 * k, 102)], cost=500.0 * (k + 1))
    return folder, start


def test_noise_that_differs_between_the_color_channels_is_no_diversity(demo):
    folder, _ = demo  # an image of 51 and a black one: a standard deviation of .1
    assert read_result(folder / "dmd2", is_last=False).diversity == pytest.approx(0.1)
    last = read_result(folder / "dmd2")
    assert (last.diversity, last.color_noise) == pytest.approx((0.2, 0))
    for k in range(40):  # red and blue alternate between the images of a prompt; the mean of the channels stays
        path = last.samples / f"{k}.png"
        sign = 1 if k % 20 < 10 else -1
        noise = 15 * sign * np.array([1, 0, -1])
        pixels = np.asarray(Image.open(path)).astype(int) // 2 + 30
        Image.fromarray((pixels + noise).astype(np.uint8)).save(path)
    last = read_result(folder / "dmd2")
    assert last.diversity == pytest.approx(0.1)
    assert last.color_noise == pytest.approx(15 / 255 * np.sqrt(2 / 3))


def test_runs_start_from_the_exports_of_the_quickstart_even_if_it_was_moved(demo):
    _, start = demo
    assert start_overrides(start) == [
        f"model.path={start}/sft/safetensors/step_{STEPS}",
        f"lora.init_from={start}/nft/safetensors/step_{STEPS}/lora",
        f"data.path={start}/data/prompts",
    ]


def test_the_report_has_the_evaluation_that_each_title_names(demo):
    folder, start = demo
    text = write_report(folder, start, ["pipe(**call)"], seconds=61.4)
    head, _, *rows = text.splitlines()[: 2 + len(MODELS)]
    assert "40 images" in head
    assert [re.findall(r"\| ([\d.]+)(?= \|)", row) for row in rows] == [
        ["0.900", "0.450", "0.400", "0.000"],
        ["0.200", "0.100", "0.100", "0.000"],
        ["0.500", "0.250", "0.200", "0.000", "3"],  # 3 * 500 samples on each of two ranks
        ["0.600", "0.300", "0.200", "0.000", "6"],
        ["0.400", "0.200", "0.100", "0.000"],
        ["0.700", "0.350", "0.200", "0.000", "9"],
    ]
    assert (folder / "report.md").read_text() == text + "\n"
    page = (folder / "index.html").read_text()
    assert re.findall(r'src="(\w+)\.png"', page) == [model.name for model in MODELS]
    assert page.count("<tr>") == 1 + len(MODELS)
    assert all((folder / f"{model.name}.png").exists() for model in MODELS)
    assert "    pipe(**call)\n" in (folder / "report.md").read_text()
    assert "<pre>pipe(**call)</pre>" in page
    assert "Total time: 61 s." in text
