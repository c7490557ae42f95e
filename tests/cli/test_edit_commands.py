"""Commands for editing models: images to edit and control videos reach the model, the rewards, pages and recipes."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from clips import write_clip
from each_case import check_each
from families import make_sampler
from wfm_ds.cli.main import main
from wfm_ds.data.datasets import load_data
from wfm_ds.data.media import load_clip
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.demos.squares_data import write_edits
from wfm_ds.demos.tiny_data import write_tiny_data
from wfm_ds.models import registry
from wfm_ds.monitoring.media_files import save_mp4
from wfm_ds.monitoring.run_data import parse_sample
from wfm_ds.recipe import file as recipe_file
from wfm_ds.types import Prompt

SIZE = ["--height", "32", "--width", "32", "--steps", "2"]
SFT = """
run: {output_dir: out, steps: 2}
model: {path: %s}
optimizer: {lr: 0.0001}
data: {kind: folder, path: %s, inputs: [source, source_2]}
sampling: {height: 32, width: 32, eval_steps: 2}
algorithm: {name: sft}
validation: {holdout: 0.5, num_prompts: 3}
"""
RL = """
run: {output_dir: out, steps: 2}
model: {path: black-forest-labs/FLUX.2-klein-base-4B}
optimizer: {lr: 0.0001}
data: {kind: folder, path: /none, inputs: [source], reward_inputs: [mask], source_size: stock, target: %s}
sampling: {height: 512, width: 512, steps: 2}
algorithm: {name: diffusion_nft}
rollout: {prompts_per_step: 2, group_size: 2}
reward: {functions: [{name: edit_judge, weight: 0.5, options: {endpoint: "http://judge/v1", model: m}}, %s]}
"""


def stripes(seed, height=32, width=32):
    """Return an image [H,W,3] of random columns."""
    columns = np.random.default_rng(seed).integers(0, 256, (1, width, 3), dtype=np.uint8)
    return np.repeat(columns, height, axis=0)


@pytest.fixture
def images(tmp_path):
    """Write 1.png and 2.png (32 x 32), wide.png (64 x 32), mask.png, and prompt files that name them."""
    for name in ("1", "2"):
        Image.fromarray(stripes(int(name))).save(tmp_path / f"{name}.png")
    Image.fromarray(stripes(3, width=64)).save(tmp_path / "wide.png")
    Image.fromarray(np.repeat(np.uint8([[0] * 20 + [255] * 12]), 32, axis=0)).save(tmp_path / "mask.png")
    (tmp_path / "plain.txt").write_text("a red circle\n")
    files = {
        "edits": [{"source": "1.png"}, {"source": "2.png"}],
        "masked": [{"source": "1.png", "mask": "mask.png"}, {"source": "wide.png", "mask": "mask.png"}],
        "notes": [{"source": "web", "mask": 1}],
        "unequal": [{"source": "1.png"}, {}],
        "gap": [{"source_2": "1.png"}],
        "mask": [{"mask": "mask.png"}],
        "lost": [{"source": "no.png"}],
    }
    for name, rows in files.items():
        text = "".join(json.dumps({"prompt": "a red circle", **row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def generate(folder, name, *words, model="tiny:flux2", prompts="plain.txt"):
    out = folder / name
    code = main(
        ["generate", "--model", str(model), "--prompts", str(folder / prompts), "--out", str(out), *SIZE, *words]
    )
    return code, [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()] if code == 0 else []


def pixels(file):
    return np.asarray(Image.open(file).convert("RGB"))


@pytest.mark.slow
def test_sources_of_options_and_prompt_files_reach_the_model(images, tiny_pipelines):
    pipeline = tiny_pipelines("flux2")
    _, one = generate(images, "one", "--source", str(images / "1.png"), model=pipeline)
    _, two = generate(images, "two", *("--source", str(images / "2.png")), *("--source", str(images / "1.png")))
    _, file = generate(images, "file", prompts="edits.jsonl", model=pipeline)
    _, none = generate(images, "none", prompts="notes.jsonl", model=pipeline)
    _, mask = generate(images, "mask", "--source", str(images / "1.png"), prompts="mask.jsonl", model=pipeline)
    for (folder, row), inputs in {
        ("one", 0): {"source": 1},
        ("two", 0): {"source": 2, "source_2": 1},
        ("file", 0): {"source": 1},
        ("file", 1): {"source": 2},
        ("none", 0): {},
        ("mask", 0): {"source": 1},  # the mask is ignored
    }.items():
        model = registry.load_model(pipeline, dtype=torch.float32, device="cpu", inputs=inputs)
        sampler = make_sampler(model, height=32, width=32, eval_steps=2)
        arrays = {name: stripes(seed) for name, seed in inputs.items()}
        prompt = Prompt(id="a", text="a red circle", inputs=arrays)
        latents = sampler.generate("sample", [prompt], [0], sampler.evaluation_plan()).clean_latents
        line = {"one": one, "two": two, "file": file, "none": none, "mask": mask}[folder][row]
        assert np.array_equal(pixels(images / folder / line["file"]), sampler.decode_to_uint8(latents)[0][0])
        for name, array in arrays.items():
            assert np.array_equal(pixels(images / folder / line["images"][name]), array)
        assert ("images" in line) == bool(inputs)
    assert not np.array_equal(pixels(images / "one" / "0000.png"), pixels(images / "file" / "0001.png"))
    page = (images / "file" / "index.html").read_text()
    assert [page.count(f'src="{row["images"]["source"]}"') for row in file] == [1, 1]


def test_sources_have_the_size_of_the_option_or_of_the_run(images, tiny_pipelines):
    """A wide image is cropped at the centre. An export uses data.source_size of its run."""
    run = images / "run"
    shutil.copytree(tiny_pipelines("flux2"), run / "safetensors" / "step_2")
    recipe = SFT.replace("source_2]", "source_2], source_size: [48, 64]") % ("tiny:flux2", "/none")
    (run / "recipe.yaml").write_text(recipe)
    export = run / "safetensors" / "step_2"
    for name, model, words, shape in (
        ("a", "tiny:flux2", [], (32, 32)),
        ("b", export, [], (48, 64)),
        ("c", export, ["--source-size", "target"], (32, 32)),
        ("d", export, ["--source-size", "16x48"], (16, 48)),
    ):
        _, [line] = generate(images, name, "--source", str(images / "wide.png"), *words, model=model)
        source = pixels(images / name / line["images"]["source"])
        assert source.shape[:2] == shape
        if shape == (32, 32):
            assert np.array_equal(source, stripes(3, width=64)[:, 16:48])


@check_each(
    ("words", "message"),
    [
        ("--model tiny:sd3 --prompts plain.txt --source 1.png", "--source: sd3 (tiny:sd3) does not edit images"),
        ("--model tiny:sd3 --prompts edits.jsonl", "edits.jsonl: sd3 (tiny:sd3) does not edit images"),
        ("--model tiny:qwen_image_edit --prompts plain.txt", "needs the input source, an image to edit: name it"),
        (
            "--model tiny:qwen_image_edit --prompts plain.txt --source 1.png --source 2.png",
            "--source: 2 source images, but qwen_image_edit (tiny:qwen_image_edit) accepts at most 1",
        ),
        ("--model tiny:flux2 --prompts plain.txt" + 4 * " --source 1.png", "--source: 4 images, at most 3"),
        ("--model tiny:flux2 --prompts edits.jsonl --source 1.png", "names the images to edit: remove one of the two"),
        ("--model tiny:flux2 --prompts plain.txt --source plain.txt", "--source: plain.txt is not an image"),
        (
            "--model tiny:flux2 --prompts plain.txt --source-size stock",
            "neither --source nor plain.txt names images to edit: remove --source-size",
        ),
        (
            "--model tiny:flux2 --prompts plain.txt --source 1.png --source-size 33x32",
            "--source-size: 33x32: height must be a multiple of",
        ),
        ("--model tiny:flux2 --prompts plain.txt --source-size 32", "'32' is not target, stock or a size such as"),
        ("--model tiny:flux2 --prompts unequal.jsonl", "prompt unequal/2 has no source, but other prompts have one"),
        ("--model tiny:flux2 --prompts gap.jsonl", "gap.jsonl has source_2, but no source"),
        ("--model tiny:flux2 --prompts lost.jsonl", "lost.jsonl: no.png, named by prompt lost/1, not found"),
    ],
)
def test_images_that_do_not_fit_are_one_line_errors(images, words, message, capsys, monkeypatch):
    monkeypatch.chdir(images)
    assert main(["generate", *words.split(), "--out", "out", *SIZE]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def write_videos(folder):
    """Write control.mp4 and mask.mp4, 32 x 48 pixels, and plain.txt. Return 5 centre-cropped frames of each video.

    The frames are those of the first half second at 8 fps. The videos have 24 and 16 fps.
    """
    (folder / "plain.txt").write_text("a red circle\n")
    videos = {}
    for name, file, fps in (("control", "control.mp4", 24), ("control_mask", "mask.mp4", 16)):
        cells = np.random.default_rng(fps).integers(0, 256, (20, 4, 6, 3), np.uint8)
        write_clip(folder / file, fps=fps, pictures=cells.repeat(8, 1).repeat(8, 2))
        framing, indices = Framing(height=32, width=48, num_frames=5), range(0, 5 * fps // 8, fps // 8)
        videos[name] = load_clip(LocalFile(folder / file), framing, draw_centre, indices)[:, :, 8:40]
    return videos


def test_control_videos_of_options_reach_the_model(tmp_path, tiny_pipelines):
    videos, pipeline = write_videos(tmp_path), tiny_pipelines("wan_vace")
    words = ["--frames", "5", "--fps", "8", "--control", str(tmp_path / "control.mp4")]
    for folder, more, names in (
        ("a", [], ["control"]),
        ("b", ["--control-mask", str(tmp_path / "mask.mp4")], ["control", "control_mask"]),
    ):
        _, [line] = generate(tmp_path, folder, *words, *more, model=pipeline)
        model = registry.load_model(pipeline, dtype=torch.float32, device="cpu", fps=8, inputs=names)
        sampler = make_sampler(model, height=32, width=32, num_frames=5, fps=8, eval_steps=2)
        prompt = Prompt(id="a", text="a red circle", inputs={name: videos[name] for name in names})
        latents = sampler.generate("sample", [prompt], [0], sampler.evaluation_plan()).clean_latents
        page = (tmp_path / folder / "index.html").read_text()
        for file, video in (
            (line["file"], sampler.decode_to_uint8(latents)[0][0]),
            *((f"{n}.mp4", videos[n]) for n in names),
        ):
            save_mp4(tmp_path / "want.mp4", video, 8)
            framing = Framing(height=video.shape[1], width=video.shape[2], num_frames=5)
            got, want = (
                load_clip(LocalFile(path), framing, draw_centre, range(5)).astype(float)
                for path in (tmp_path / folder / file, tmp_path / "want.mp4")
            )
            assert np.abs(got - want).mean() < 0.1  # the encoder's threads may round differently
            assert page.count(f'<video class="small" src="{file}"') == 1
    assert (tmp_path / "a" / "0000.mp4").read_bytes() != (tmp_path / "b" / "0000.mp4").read_bytes()
    Image.fromarray(videos["control"][0]).save(tmp_path / "1.png")
    code, [line] = generate(tmp_path, "image", "--control", str(tmp_path / "1.png"), model=pipeline)
    assert (code, line["file"]) == (0, "0000.png")


def test_control_videos_that_do_not_fit_are_one_line_errors(tmp_path, capsys, monkeypatch):
    write_videos(tmp_path)
    Image.new("RGB", (32, 32)).save(tmp_path / "1.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "load_model", None)  # the errors come before the weights are loaded
    fix = "use another file, or change --frames or --fps"
    for words, message in (
        ("tiny:sd3 --control control.mp4", "--control: sd3 (tiny:sd3) does not support control: remove it"),
        ("tiny:wan_vace", "wan_vace (tiny:wan_vace) needs the input control: pass --control"),
        ("tiny:wan_vace --control-mask mask.mp4", "--control-mask: needs --control"),
        ("tiny:wan_vace --control control.mp4 --clips 2", "--control: does not work with --clips above 1"),
        ("tiny:wan_vace --control plain.txt", "--control: plain.txt: cannot be decoded"),
        ("tiny:wan_vace --control none.mp4", "--control: none.mp4: cannot be decoded, FileNotFoundError"),
        ("tiny:wan_vace --control 1.png", f"--control: 1.png: an image, but clips have 5 frames: {fix}"),
        (
            "tiny:wan_vace --control control.mp4 --frames 9",
            f"--control: control.mp4: 0.79 s, but clips have 1.00 s (9 frames): {fix}",
        ),
        (
            "tiny:wan_vace --control control.mp4 --control-mask mask.mp4 --fps 24",
            "--control-mask: mask.mp4: 16.00 fps is too low for clips of 24 fps without repeated frames",
        ),
    ):
        common = ["--prompts", "plain.txt", "--out", "out", *SIZE, "--frames", "5", "--fps", "8"]
        assert main(["generate", *common, "--model", *words.split()]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def test_an_evaluation_compares_samples_with_their_sources(images, monkeypatch, capsys):
    monkeypatch.chdir(images)
    common = [*SIZE, "--seeds", "1", "--diversity", "rgb", "--rewards"]
    assert main(["evaluate", "tiny:flux2", "--prompts", "masked.jsonl", *common, "preservation", "--out", "a"]) == 0
    rows = [json.loads(line) for line in (images / "a" / "tiny_flux2" / "samples.jsonl").read_text().splitlines()]
    for row, source in zip(rows, (stripes(1), stripes(3, width=64)[:, 16:48]), strict=True):
        sample = pixels(images / "a" / "tiny_flux2" / row["file"])
        outside = (sample[:, :20].astype(float) - source[:, :20]) / 255  # the mask is dark there
        assert row["rewards"]["preservation"] == pytest.approx(-10 * np.log10((outside**2).mean()) / 30, rel=1e-6)
    assert "<th>source</th><th>mask</th>" in (images / "a" / "index.html").read_text()
    for words, message in (
        (["tiny:sd3", "--prompts", "edits.jsonl", *common, "color"], "sd3 (tiny:sd3) does not edit images"),
        (["tiny:flux2", "--prompts", "plain.txt", *common, "preservation"], "compares samples with their source: name"),
        (["tiny:flux2", "--prompts", "edits.jsonl", *common, "preservation"], "preservation needs masks: name them"),
        (["tiny:qwen_image_edit", "--prompts", "plain.txt", *common, "color"], "needs the input source"),
    ):
        assert main(["evaluate", *words, "--out", "b"]) == 2
        assert message in capsys.readouterr().err


def test_an_evaluation_reads_the_sources_of_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_edits(tmp_path / "edits")
    (tmp_path / "sft.yaml").write_text(SFT % ("tiny:flux2", "edits"))
    words = ["--data", "sft.yaml", "--rewards", "color", "--seeds", "1", "--diversity", "rgb", "--out", "a"]
    assert main(["evaluate", "tiny:flux2", *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "a" / "tiny_flux2" / "samples.jsonl").read_text().splitlines()]
    assert len({row["prompt_id"] for row in rows}) == 3
    for row in rows:
        file = tmp_path / "edits" / "source" / row["prompt_id"].rpartition("/")[2]
        want = np.asarray(Image.open(file.with_suffix(".png")).resize((32, 32), Image.Resampling.BICUBIC))
        assert np.array_equal(pixels(tmp_path / "a" / "tiny_flux2" / row["images"]["source"]), want)
        assert row["images"].keys() == {"source", "source_2"}


def test_init_writes_recipes_for_edits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_edits(tmp_path / "edits")
    write_edits(tmp_path / "sources")
    table = tmp_path / "sources" / "metadata.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    table.write_text("".join(json.dumps({key: row[key] for key in ("prompt", "source")}) + "\n" for row in rows))

    def init(*words):
        code = main(["init", "--yes", "--force", "--out", "mine.yaml", *words])
        return recipe_file.load_recipe(tmp_path / "mine.yaml") if code == 0 else capsys.readouterr().err

    sft = init("--data", "edits", "--model", "tiny:flux2")
    assert (sft.algorithm.name, sft.data.inputs) == ("sft", ["source", "source_2", "source_3"])
    assert (sft.data.reward_inputs, sft.data.target) == ([], True)
    one = init("--data", "edits", "--model", "tiny:qwen_image_edit", "--rl", "edit_judge")
    assert (one.data.inputs, one.data.reward_inputs) == (["source"], ["mask"])
    assert [(f.name, f.weight) for f in one.rl.reward.functions] == [("edit_judge", 0.5), ("preservation", 0.5)]
    assert one.algorithm.conditioning_frame_range == (0, 0)
    alone = init("--data", "sources", "--model", "tiny:flux2", "--rl", "preservation")
    assert (alone.data.target, alone.data.reward_inputs) == (False, [])
    assert [(f.name, f.options) for f in alone.rl.reward.functions] == [("preservation", {"whole": True})]
    for data, options in (("sources", {"whole": True}), ("edits", {})):
        held = init("--data", data, "--model", "tiny:flux2", "--rl", "edit_judge", "--held-out", "preservation")
        assert [(f.name, f.options) for f in held.validation.held_out_rewards] == [("preservation", options)]
    pairs = init("--data", "edits/pairs.jsonl", "--model", "tiny:flux2")
    assert (pairs.data.kind, pairs.data.inputs[0]) == ("pairs", "source")
    for words, message in (
        ("--data edits/target --prompt x --model tiny:qwen_image_edit", "needs source for each sample"),
        ("--data sources --model tiny:flux2 --task sft", "24 images to edit, 56 x 56 to 56 x 56, which do not fit"),
        ("--data sources --model tiny:sd3 --rl color", "RL of tiny:sd3"),
    ):
        assert message in init(*words.split())


@check_each("target", ["true", "false"])
def test_tiny_rl_recipes_have_edits_and_weight_free_rewards(target, tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rl.yaml"
    path.write_text(RL % (target, "{name: preservation, weight: 0.5, options: {full_at: 20}}"))
    tiny = recipe_file.load_tiny_recipe(path, (), world_size=1)
    assert (tiny.data.inputs, tiny.data.reward_inputs, tiny.data.source_size) == (["source"], ["mask"], "target")
    rewards = {function.name: (function.weight, function.options) for function in tiny.rl.reward.functions}
    assert rewards == {"preservation": (0.5, {"full_at": 20}), "color": (1.0, {})}
    write_tiny_data(tiny)
    for sample in load_data(tiny).samples:
        source, mask = (pixels(sample.images[name].file).astype(int) for name in ("source", "mask"))
        if tiny.data.target:
            assert np.array_equal(np.abs(pixels(sample.media.file) - source).sum(-1) > 0, mask[..., 0] > 0)
        else:
            assert sample.media == sample.images["source"]
    path.write_text(RL % (target, "{name: preservation, weight: 0.5, options: {measure: lpips}}"))
    lpips = recipe_file.load_tiny_recipe(path, (), world_size=1)  # needs weights
    assert [function.name for function in lpips.rl.reward.functions] == ["color"]


def test_other_tiny_recipes_have_edits_with_several_images(tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "mine.yaml"
    sft = SFT % ("black-forest-labs/FLUX.2-klein-base-4B", "/none")
    for text in (sft, sft.replace("folder", "pairs").replace("name: sft", "name: dpo")):
        path.write_text(text)
        for inputs in ("[source]", "[source,source_2,source_3]"):
            tiny = recipe_file.load_tiny_recipe(path, [f"data.inputs={inputs}"], world_size=1)
            write_tiny_data(tiny)
            data = load_data(tiny)
            assert data.num_samples == 24
            assert {len(sample.images) for sample in data.samples} == {inputs.count("source")}
            assert all((sample.rejected is None) == (tiny.data.kind == "folder") for sample in data.samples)


def test_tiny_pairs_have_control_videos(tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path / "cache"))
    text = SFT % ("Wan-AI/Wan2.1-VACE-1.3B-diffusers", "/none")
    for old, new in (
        ("source, source_2", "control, control_mask"),
        ("kind: folder", "kind: pairs"),
        ("name: sft", "name: dpo"),
        ("width: 32", "width: 32, num_frames: 9"),
    ):
        text = text.replace(old, new)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    tiny = recipe_file.load_tiny_recipe(path, (), world_size=1)
    write_tiny_data(tiny)
    data, framing = load_data(tiny), Framing(height=32, width=32, num_frames=tiny.sampling.num_frames)
    assert (data.num_samples, tiny.sampling.num_frames) == (48, 5)
    for sample in data.samples:
        files = (sample.media, sample.rejected, sample.images["control"], sample.images["control_mask"])
        chosen, rejected, control, mask = (load_clip(file, framing, draw_centre) > 0 for file in files)
        assert (chosen <= control).all()
        assert (rejected > control).any()
        assert np.array_equal(mask[0], control.any(axis=0))


def test_pages_of_runs_show_input_images_of_the_same_folder():
    line = {"file": "0000.png", "prompt": "a", "prompt_id": "p/1", "images": {"source": "s.png", "mask": "../m.png"}}
    sample = parse_sample(json.dumps({**line, "images": {**line["images"], "other": "o.png"}}), 3)
    assert (sample["id"], sample["images"]) == ("p/1", {"source": "samples/step_3/s.png"})
