"""The page of a quickstart: its curves, its samples, and the report as HTML."""

import re

import numpy as np
from PIL import Image

from wfm_ds.demos.digits import DigitsDemo, write_readings
from wfm_ds.demos.digits_data import digit_caption, reward_split
from wfm_ds.demos.files import write_json_rows
from wfm_ds.demos.report_page import load_curves, report_html, write_page
from wfm_ds.monitoring.line_chart import HEIGHT, MARGIN, WIDTH, chart_html
from wfm_ds.monitoring.media_files import encode_gif, save_png
from wfm_ds.monitoring.samples import write_table


def write_run(run, values, *samples):
    """Write the evaluations of an RL run. values: {RL step: value of both classifiers}."""
    lines = [{"step": 1, "time": "now", "loss/total": 1.0}]
    for step, value in values.items():
        (run / "samples" / f"step_{step}").mkdir(parents=True)
        write_table(run / "samples" / f"step_{step}", samples)
        lines.append({"step": 2 * step, "time": "now"} | dict.fromkeys(DigitsDemo.curves.values(), value))
    write_json_rows(run / "metrics.jsonl", lines)


def test_curves_have_the_rl_step_and_the_value_of_each_evaluation(tmp_path):
    write_run(tmp_path, {0: 0.5, 6: 0.7, 12: 0.9})
    curves = load_curves(tmp_path, DigitsDemo.curves)
    assert curves == {label: [(0, 0.5), (6, 0.7), (12, 0.9)] for label in DigitsDemo.curves}


def test_points_of_the_chart_are_at_their_step_and_value():
    html = chart_html({"a<b": [(0, 0.0), (6, 1.0), (12, 0.5)], "c": [(0, 0.25), (12, 0.25)]}, "RL step")
    circles = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', html)]
    top, bottom, right = MARGIN, MARGIN + HEIGHT, MARGIN + WIDTH
    assert circles[:3] == [(MARGIN, bottom), (MARGIN + WIDTH / 2, top), (right, MARGIN + HEIGHT / 2)]
    assert circles[3:] == [(MARGIN, MARGIN + HEIGHT * 0.75), (right, MARGIN + HEIGHT * 0.75)]
    assert "a&lt;b</b>: 0.000 &rarr; 0.500" in html
    assert len(set(re.findall(r"<circle[^>]*fill=\"(\S+)\"", html))) == 2


def test_the_page_shows_samples_side_by_side_and_a_curve_from_three_evaluations_on(tmp_path):
    frames = np.zeros((3, 40, 100, 3), np.uint8)
    for name in ("before", "after"):
        save_png(tmp_path / f"{name}.png", frames[0])
    write_run(tmp_path / "nft", {0: 0.5, 6: 0.7})
    write_page(DigitsDemo(), tmp_path, tmp_path / "nft", ["| a | b |", "|---|---|", "| x | 1 |"])
    page = (tmp_path / "index.html").read_text()
    images = re.findall(r'<img src="(\w+.png)".* style="width: (\d+)px"', page.replace("<figure>", "\n"))
    assert images == [("before.png", "600"), ("after.png", "600")]
    assert "<svg" not in page
    assert "<video" not in page

    for name in ("before", "after"):
        (tmp_path / f"{name}.gif").write_bytes(encode_gif(frames, 4))
    write_run(tmp_path / "longer", {0: 0.5, 6: 0.7, 12: 0.9}, {"file": "0000.mp4", "prompt": "a<b"})
    write_page(DigitsDemo(), tmp_path, tmp_path / "longer", [])
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 1
    videos = ["longer/samples/step_0/0000.mp4", "longer/samples/step_12/0000.mp4"]
    assert re.findall(r'src="(\S+)"', page) == ["before.png", "after.png", "before.gif", "after.gif", *videos]
    assert page.count("</video>a&lt;b") == 2
    assert 'href="longer/index.html"' in page


def test_tables_code_and_text_of_the_report_become_html():
    table = ["| <t> | before |", "|---|---|", "| row | 0.5 |"]
    assert report_html([*table, "", "Load it:", "", "    one", "      two", "end"]) == (
        "<table><tr><th>&lt;t&gt;</th><th>before</th></tr>\n<tr><td>row</td><td>0.5</td></tr></table>\n"
        "<p>Load it:</p>\n<pre>one\n  two</pre>\n<p>end</p>"
    )


def test_the_classifiers_digit_is_green_if_it_matches_the_prompt(tmp_path):
    images, labels = reward_split()  # the classifier was fitted to these
    prompts = [digit_caption((int(digit) + (k == 1)) % 10)["prompt"] for k, digit in enumerate(labels[:10])]
    samples = [(np.repeat(image[..., None], 3, axis=2), prompt) for image, prompt in zip(images, prompts, strict=False)]
    write_readings(tmp_path / "readings.png", samples)
    sheet = np.asarray(Image.open(tmp_path / "readings.png")).astype(int)
    assert sheet.shape[1] >= 10 * 64
    for column in range(10):
        x, image = 2 + 66 * column, samples[column][0]
        np.testing.assert_array_equal(sheet[2:66:8, x : x + 64 : 8], image)  # enlarged without smoothing
        label = sheet[66:80, x : x + 64]
        color = label[np.unravel_index(label.sum(axis=2).argmin(), label.shape[:2])]
        is_red = color[0] > color[1]
        assert is_red == (column == 1), column
