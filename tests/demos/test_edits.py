"""The edit demo: its data, its rewards, its recipes, and the report of its runs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from reward_samples import loaded, media_batch
from wfm_ds.cli import generate
from wfm_ds.demos import edits_data
from wfm_ds.demos.digits_data import sft_split
from wfm_ds.demos.edits import IMAGE_FILE, OUTCOMES, EditsDemo
from wfm_ds.demos.edits_data import CELL, EDIT_SETS, SIDES, edit_image, write_digit_edits
from wfm_ds.demos.report_page import write_page
from wfm_ds.models.tiny.vaes import exact_flux2_vae
from wfm_ds.monitoring.samples import GeneratedSample, write_samples
from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.shipped_recipes import require_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, again = (tmp_path_factory.mktemp(name) / "data" for name in ("one", "two"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits_data, "EDIT_SETS", tuple(replace(one, num_sources=60) for one in EDIT_SETS))
        assert [write_digit_edits(out) for out in (folder, again)] == [120, 120]
    files = [file.relative_to(folder) for file in folder.rglob("*.*")]
    assert all((folder / file).read_bytes() == (again / file).read_bytes() for file in files)
    return folder


def read_table(folder):
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def load_grey(path):
    pixels = np.asarray(Image.open(path))
    assert (pixels == pixels[..., :1]).all()
    return pixels[..., 0].astype(int)


def test_a_third_of_the_edited_images_is_right_and_no_digit_is_in_two_sets(data):
    images, labels = sft_split()
    index = {image.tobytes(): number for number, image in enumerate(images)}
    used = []
    for settings in EDIT_SETS:
        rows = read_table(data / settings.folder)
        assert {row["prompt"] for row in rows} == {"invert the left digit", "invert the right digit"}
        used.append(set())
        for number, row in enumerate(rows, start=1):
            folder, side = data / settings.folder, SIDES.index(row["side"])
            assert row["prompt"] == f"invert the {row['side']} digit"
            source = load_grey(folder / row.get("source", row["file_name"]))
            halves = [half[::CELL, ::CELL].astype(np.uint8) for half in np.split(source, 2, axis=1)]
            assert (np.kron(np.hstack(halves), np.ones((CELL, CELL))) == source).all()
            digits = [index[half.tobytes()] for half in halves]
            used[-1].update(digits)
            assert labels[digits[side]] == row["label"]
            inverted = np.zeros((64, 128), bool)
            inverted[:, 64 * side : 64 * (side + 1)] = True
            assert (load_grey(folder / row["mask"]) == 255 * inverted).all()
            if settings.has_targets:
                wanted = (inverted, np.ones_like(inverted), np.zeros_like(inverted))[number % 3]
                assert (load_grey(folder / row["file_name"]) == np.where(wanted, 255 - source, source)).all()
    assert not any(a & b for k, a in enumerate(used) for b in used[k + 1 :])
    for line in (data / "prompts.jsonl").read_text().splitlines():
        assert (data / json.loads(line)["source"]).is_file()


def test_the_latents_of_the_model_are_the_pixels_of_the_digits():
    cells = 2 * torch.rand(2, 1, 8, 16, generator=torch.Generator().manual_seed(0)) - 1
    pixels = cells.repeat_interleave(CELL, dim=2).repeat_interleave(CELL, dim=3).expand(-1, 3, -1, -1)
    vae = exact_flux2_vae()
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        decoded = vae.decode(posterior.mode()).sample
    torch.testing.assert_close(posterior.mode(), cells, rtol=0, atol=1e-4)
    torch.testing.assert_close(decoded, pixels, rtol=0, atol=1e-4)
    assert posterior.std.max() < 1e-6


def score(reward, images, metadata):
    return reward.score(media_batch(np.stack(images), [""] * len(images), metadata, reward=reward.name))


def test_the_judges_read_the_inverted_digit_of_the_named_half_and_ignore_the_other_half():
    images, labels = sft_split()
    pairs = np.arange(200).reshape(100, 2)
    sources = [edits_data.draw_pair(images[pair]) for pair in pairs]
    for name in ("edited_digits", "seen_edited_digits"):
        reward = loaded(name)
        for k, side in enumerate(SIDES):
            metadata = [{"side": side, "label": int(labels[pair[k]])} for pair in pairs]
            shares = []
            for kind in range(3):
                edited = [as_rgb(edit_image(source, side, kind)) for source in sources]
                shares.append(np.mean([s.value for s in score(reward, edited, metadata)]))
            assert min(shares[:2]) >= 0.95, (name, side)
            assert shares[0] == shares[1]
            assert shares[2] <= 0.15
        for metadata, message in (
            ({"side": "up", "label": 1}, "the metadata `side` is 'up', not left or right"),
            ({"side": "left", "label": "1"}, "the metadata `label` is '1', not a digit from 0 to 9"),
            ({"side": "left", "label": 10}, "the metadata `label` is 10, not a digit from 0 to 9"),
        ):
            assert score(reward, [as_rgb(sources[0])], [metadata])[0].failure == message
        small = np.zeros((8, 15, 3), np.uint8)
        assert "too small for two digits" in score(reward, [small], [{"side": "left", "label": 1}])[0].failure


def as_rgb(grey):
    return np.repeat(grey[..., None], 3, axis=-1)


def test_the_rl_recipes_differ_only_in_their_rewards():
    recipes = {name: load_recipe(require_recipe(f"edits/{name}")) for name in ("nft", "nft_judge", "nft_preservation")}
    dumped = {name: recipe.model_dump() for name, recipe in recipes.items()}
    trained = {name: [f.name for f in recipe.reward.functions] for name, recipe in recipes.items()}
    both = {"nft": ["edited_digits", "preservation"]}
    assert trained == both | {"nft_judge": ["edited_digits"], "nft_preservation": ["preservation"]}
    for name, values in dumped.items():
        held_out = [reward["name"] for reward in values["validation"].pop("held_out_rewards")]
        assert {*trained[name], *held_out} == {"edited_digits", "preservation", "seen_edited_digits"}
        assert "seen_edited_digits" in held_out
        values["reward"].pop("functions")
        values["run"].pop("output_dir")
    assert dumped["nft"] == dumped["nft_judge"] == dumped["nft_preservation"]


def edit_sample(number, judge, psnr):
    grey = np.full((64, 128, 3), 50, np.uint8)
    return GeneratedSample(
        prompt="invert the left digit",
        prompt_id=f"sources/{number // 2}",
        seed=number % 2,
        pixels=grey,
        rewards={"edited_digits": judge, "preservation": psnr and psnr / 30, "seen_edited_digits": 1.0},
        parts={} if psnr is None else {"preservation/psnr_db": psnr},
        images={"source": grey, "mask": grey},
    )


def test_the_report_counts_right_edits_copies_and_leaks(data):
    folder, run, demo = data.parent / "quickstart", data.parent / "quickstart" / "nft", EditsDemo()
    outcomes = [(1.0, 25.0), (1.0, 20.0), (0.0, 25.0), (0.0, 15.0), (None, 25.0), (1.0, None)]
    for step, right in ((0, 2), (20, 4), (80, 14)):  # numbers of right edits
        edits = [(1.0, 25.0)] * right + outcomes
        write_samples(run / "samples" / f"step_{step}", [edit_sample(k, *edit) for k, edit in enumerate(edits)])
    (run / "metrics.jsonl").write_text("")
    report = demo.write_comparison(folder, run)
    rows = dict(re.findall(r"^\| (.+?) \| ([\d.]+ \| [\d.]+) \|$", "\n".join(report), re.M))
    assert rows == {
        OUTCOMES["right"]: "0.375 | 0.750",
        OUTCOMES["copy"]: "0.250 | 0.100",
        OUTCOMES["leak"]: "0.250 | 0.100",
        "classifier of the reward reads the inverted digit": "0.625 | 0.850",
        "second classifier (not used by RL)": "1.000 | 1.000",
        "PSNR outside the named half, in dB": "22.857 | 24.211",
    }
    assert Image.open(folder / IMAGE_FILE).size == (6 * (130 + 2) + 2, 2 * (66 + 14 + 2) + 2)  # 4 sources before RL
    write_page(demo, folder, run, report)
    page = (folder / "index.html").read_text()
    assert page.count("<circle") == 4 * 3
    assert f'<img src="{IMAGE_FILE}"' in page
    arguments = generate.parser().parse_args(f"--pipeline {run} {demo.generate_arguments(data.parent)}".split())
    assert (arguments.height, arguments.width) == (64, 128)
