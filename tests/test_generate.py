"""`wfm generate` draws the same images as the sampler of a run, and writes a page and a list of samples."""

import json
import re

import av
import numpy as np
import pytest
import torch
from PIL import Image

from commands import wfm_command
from each_case import check_each
from families import make_sampler
from wfm_ds.contract.denoiser_checks import add_random_adapter
from wfm_ds.contract.export_checks import ExportSource
from wfm_ds.demos.room_data import write_room
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import export_weights
from wfm_ds.models import registry
from wfm_ds.models.sampler import Sampler
from wfm_ds.types import Prompt

main = wfm_command("generate")
FIXED = {"height": 32, "width": 32, "eval_steps": 2}
SIZE = ["--height", "32", "--width", "32", "--steps", "2"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [
        {"prompt": "a red circle"},
        {"prompt": "a cat & a <b>", "negative_prompt": "blue"},
        {"prompt": "caf\u00e9"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def pipeline(tiny_pipelines):
    return tiny_pipelines("sd3")


@pytest.fixture
def decoded(monkeypatch):
    """Collect the latents of all samples."""
    latents, decode = [], Sampler.start_decoding
    monkeypatch.setattr(Sampler, "start_decoding", lambda self, x, *rows: latents.append(x) or decode(self, x, *rows))
    return latents


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def drawn_by(model, prompts, seeds, **settings):
    """Return the images uint8 [B,H,W,3] that the sampler draws, ordered by prompt and then by seed."""
    items = [(prompt, seed) for prompt in prompts for seed in seeds]
    sampler = make_sampler(model, **FIXED, **settings)
    return sampler.decode_to_uint8(
        sampler.generate("sample", *zip(*items, strict=True), sampler.evaluation_plan()).clean_latents
    )[0]


def test_every_prompt_is_sampled_with_every_seed_and_its_negative_text(pipeline, prompts, tmp_path, capsys):
    arguments = ["--guidance", "3", "--negative-prompt", "black", "--seeds", "7", "8", "--batch", "6"]
    out = tmp_path / "new" / "out"
    code = main(["--model", pipeline, "--prompts", prompts, "--out", out, *SIZE, *arguments])
    assert (code, capsys.readouterr().out) == (0, f"{out / 'index.html'}\n")
    asked = [("a red circle", None), ("a cat & a <b>", "blue"), ("caf\u00e9", None)]
    rows = lines(out)
    assert [(r["prompt"], r["prompt_id"], r["seed"]) for r in rows] == [
        (text, f"mine/{i}", seed) for i, (text, _) in enumerate(asked, 1) for seed in (7, 8)
    ]
    model = registry.load_model(pipeline, dtype=torch.float32, device="cpu")
    wanted = [Prompt(id=text, text=text, negative_text=negative) for text, negative in asked]
    want = drawn_by(model, wanted, [7, 8], guidance_scale=3, negative_prompt="black")
    got = np.stack([np.asarray(Image.open(out / r["file"])) for r in rows])
    assert np.array_equal(got, want)
    html = (out / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<img[^>]* src="([^"]*)"', html) == [r["file"] for r in rows]
    assert "<h2>a cat &amp; a &lt;b&gt;</h2>" in html
    assert "seed 8, 2 steps, guidance 3, 32 x 32" in html
    assert sorted(f.name for f in out.iterdir()) == [*(f"000{i}.png" for i in range(6)), "index.html", "samples.jsonl"]


def test_the_same_command_writes_the_same_bytes_and_batches_change_only_rounding(pipeline, prompts, tmp_path):
    for name, batch in (("a", "3"), ("b", "3"), ("c", "1")):
        out = tmp_path / name
        assert main(["--model", pipeline, "--prompts", prompts, "--out", out, *SIZE, "--batch", batch]) == 0
    content = {name: {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc"}
    assert content["a"] == content["b"]
    for row in lines(tmp_path / "a"):
        one, other = (np.asarray(Image.open(tmp_path / name / row["file"]), np.int16) for name in "ac")
        assert np.abs(one - other).max() <= 1


def test_videos_follow_actions_and_others_are_refused(tiny_pipelines, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a world\n")
    for name, actions in {"up": np.ones((4, 2)), "down": -np.ones((4, 2)), "long": np.ones((5, 2))}.items():
        np.save(tmp_path / f"{name}.npy", actions)
    np.save(tmp_path / "nan.npy", np.full((4, 2), np.nan))
    np.save(tmp_path / "complex.npy", np.full((4, 2), 1j))
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04" + bytes(60))
    common = ["--model", tiny_pipelines("cosmos25"), "--guardrail", "off", "--prompts", tmp_path / "a.txt"]
    common += [*SIZE, "--frames", "5", "--out"]
    own = ["--family", "steered:Steered"]
    shown = []
    for name in ("up", "down"):
        assert main([*common, tmp_path / name, *own, "--actions", tmp_path / f"{name}.npy"]) == 0
        with av.open(str(tmp_path / name / lines(tmp_path / name)[0]["file"])) as video:
            shown.append(np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(int))
    assert np.abs(shown[0] - shown[1]).max() > 10
    assert "up.npy" in (tmp_path / "up" / "index.html").read_text()
    for arguments, says in (
        (own, "needs the input actions: pass --actions"),
        ([*own, "--actions", tmp_path / "long.npy"], f"cannot use {tmp_path}/long.npy: actions [1, 5, 2] of 5"),
        ([*own, "--actions", tmp_path / "nan.npy"], "nan.npy cannot be read: contains NaN or infinite numbers"),
        ([*own, "--actions", tmp_path / "zip.npy"], "zip.npy cannot be read: damaged"),
        ([*own, "--actions", tmp_path / "complex.npy"], "complex.npy cannot be read: not an array of real"),
        ([*own, "--domain", "99"], "--domain: needs --actions"),
        ([*own, "--domain", "umi_2"], "unknown robot umi_2: did you mean umi?"),
        ([*own, "--viewpoint", "wrist_view"], "--viewpoint: needs --actions"),
        ([*own, "--viewpoint", "wrist"], "unknown view wrist: did you mean wrist_view?"),
        ([*own, "--actions", tmp_path / "up.npy", "--viewpoint", "wrist_view"], "do not mention the view: remove it"),
        (["--actions", tmp_path / "up.npy"], "does not support actions: remove it"),
    ):
        assert main([*common, tmp_path / "none", *arguments]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_captions_of_actions_have_a_view(tiny_pipelines, tmp_path):
    (tmp_path / "a.txt").write_text("a world\n")
    np.save(tmp_path / "up.npy", np.ones((4, 9)))
    common = ["--model", tiny_pipelines("cosmos3"), "--guardrail", "off", "--prompts", tmp_path / "a.txt", *SIZE]
    common += ["--frames", "5", "--actions", tmp_path / "up.npy", "--domain", "pusht"]
    told = {"none": [], "ego": ["--viewpoint", "ego_view"], "wrist": ["--viewpoint", "wrist_view"]}
    files = {}
    for name, arguments in told.items():
        assert main([*common, *arguments, "--out", tmp_path / name]) == 0
        files[name] = (tmp_path / name / lines(tmp_path / name)[0]["file"]).read_bytes()
    assert files["none"] == files["ego"] != files["wrist"]
    assert "wrist_view" in (tmp_path / "wrist" / "index.html").read_text()


def test_videos_follow_a_camera_and_others_are_refused(tiny_pipelines, tmp_path, capsys):
    write_room(tmp_path / "room")
    prompts, camera = tmp_path / "room" / "prompts.txt", tmp_path / "room" / "camera.json"
    texts = ["--prompts", prompts, *SIZE, "--frames", "9", "--out"]
    common = ["--model", tiny_pipelines("sana_wm"), *texts]
    first = ["--first-frame", tmp_path / "room" / "start.png"]
    np.save(tmp_path / "path.npy", json.loads(camera.read_text())["c2w"])
    np.save(tmp_path / "scaled.npy", 2 * np.eye(4)[None].repeat(9, 0))
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 99999)
    lens = ["--intrinsics", "24", "24", "16", "16"]
    path, keys = tmp_path / "path.npy", "lw-8"
    shown = []
    for name, told in {"json": [camera], "npy": [path, *lens], "keys": [keys, *lens]}.items():
        assert main([*common, tmp_path / name, *first, "--camera", *told]) == 0
        shown.append((tmp_path / name / lines(tmp_path / name)[0]["file"]).read_bytes())
    assert shown[0] == shown[1] != shown[2]
    assert "lw-8" in (tmp_path / "keys" / "index.html").read_text()
    for arguments, says in (
        ([*first], "needs the input c2w: pass --camera"),
        (["--camera", camera], "needs a first frame: pass an image with --first-frame"),
        ([*first, "--camera", camera, *lens], "camera.json cannot be read: the camera file already has intrinsics"),
        ([*first, "--camera", path], "path.npy cannot be read: the camera has no intrinsics: pass them too"),
        ([*first, "--camera", "lw-7", *lens], "cannot use lw-7: c2w must be [9, 4, 4], got [8, 4, 4]"),
        ([*first, "--camera", "w-999999", *lens], "w-999999 cannot be read: 999,999 frames, at most 10,000"),
        (
            [*first, "--camera", "w-99999999999", *lens],
            "w-99999999999 cannot be read: neither a .json or .npy file nor",
        ),
        ([*first, "--camera", tmp_path / "deep.json", *lens], "deep.json cannot be read: not a JSON object with c2w"),
        ([*first, "--camera", "left", *lens], "left cannot be read: neither a .json or .npy file nor keys"),
        ([*first, "--camera", tmp_path / "scaled.npy", *lens], "rotation is not orthonormal with determinant 1"),
        ([*first, "--camera", tmp_path / "empty.json", *lens], "cannot be read: not a JSON object"),
        ([*first, *lens], "--intrinsics: needs --camera"),
    ):
        assert main([*common, tmp_path / "none", *arguments]) == 2
        assert says in capsys.readouterr().err
    others = ["--model", tiny_pipelines("wan21"), *texts, tmp_path / "none"]
    assert main([*others, "--camera", camera]) == 2
    assert "--camera: wan " in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_videos_start_with_the_first_frame(tiny_pipelines, tmp_path, decoded, capsys):
    """The first latent frame equals the encoded image, and the second one differs between two images."""
    (tmp_path / "a.txt").write_text("a cat\n")
    pictures = [np.full((48, 32, 3), level, np.uint8) for level in (20, 220)]
    for name, picture in zip(("dark", "bright"), pictures, strict=True):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
        texts = ["--prompts", tmp_path / "a.txt"]
        common = ["--model", tiny_pipelines("cosmos25"), "--guardrail", "off", *texts]
        frame = ["--frames", "5", "--guidance", "2", "--first-frame", tmp_path / f"{name}.png"]
        assert main([*common, *frame, "--out", tmp_path / name, *SIZE]) == 0
    model = registry.load_model(tiny_pipelines("cosmos25"), dtype=torch.float32, device="cpu", guardrail="off")
    for latents, picture in zip(decoded, pictures, strict=True):
        assert torch.equal(latents[0, :, 0], model.encode_uint8([picture[8:40]])[0, :, 0])
    assert (decoded[0][:, :, 1] - decoded[1][:, :, 1]).abs().max() > 1e-3
    assert "dark.png" in (tmp_path / "dark" / "index.html").read_text()
    common[1] = tiny_pipelines("wan21")
    assert main([*common[:2], *common[4:], *frame, "--out", tmp_path / "none", *SIZE]) == 2
    assert "--first-frame: wan " in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_image_to_video_models_need_a_first_frame(tiny_pipelines, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a cat\n")
    common = ["--model", tiny_pipelines("wan22_i2v"), "--prompts", tmp_path / "a.txt", "--frames", "5", *SIZE]
    drawn = []
    for level in (20, 220):
        picture = np.full((48, 32, 3), level, np.uint8)
        Image.fromarray(picture).save(tmp_path / "a.png")
        out = tmp_path / str(level)
        assert main([*common, "--first-frame", tmp_path / "a.png", "--out", out]) == 0
        drawn.append((out / lines(out)[0]["file"]).read_bytes())
    assert drawn[0] != drawn[1]
    assert main([*common, "--out", tmp_path / "none"]) == 2
    assert "needs a first frame: pass an image with --first-frame" in capsys.readouterr().err


def test_a_few_step_lora_samples_as_in_validation(tiny_pipelines, tmp_path, decoded, capsys):
    """call.json and scheduler_config.json of the LoRA provide steps, levels and guidance."""
    noisy = {"solver": "cps", "noise_level": 1.0, "eval_solver": "cps"}
    for family, frames, keys in (("sd3", 1, noisy), ("wan21", 5, {"grid_shift": 7.0})):
        model = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu")
        size = {"height": 32, "width": 32, "num_frames": frames}
        sampler = make_sampler(model, **size, eval_steps=3, eval_grid="even", guidance_scale=2.0, **keys)
        add_random_adapter(model, b_std=0.3)
        source, chosen = ExportSource(model, uses_lora=True), {"policy": "train", "dtype": torch.float32}
        target = ExportTarget.from_model(model, sampler.settings)
        lora = export_weights(target, source, tmp_path / family, is_main=True, **chosen)
        texts = [Prompt(id=text, text=text) for text in ("a red circle", "caf\u00e9")]
        plan = sampler.evaluation_plan()
        want = sampler.generate("validation", texts, [7, 7], plan).clean_latents
        words = ["--model", tiny_pipelines(family), "--lora", lora, "--frames", frames, *SIZE[:4]]
        (tmp_path / "two.txt").write_text("a red circle\ncaf\u00e9\n", encoding="utf-8")
        words += ["--prompts", tmp_path / "two.txt", "--seeds", "7", "--batch", "2", "--out"]
        assert main([*words, tmp_path / f"{family}_out"]) == 0
        assert torch.equal(decoded[-1], want)
        assert main([*words, tmp_path / f"{family}_other", "--steps", "2", "--grid", "stock"]) == 0
        assert (decoded[-1] - want).abs().max() > 0.01
    page = (tmp_path / "sd3_out" / "index.html").read_text(encoding="utf-8")
    assert "3 steps at even noise levels, guidance 2, 32 x 32" in page
    capsys.readouterr()
    for more, message in (
        (["--solver", "dpm2"], "--solver: dpm2 does not work with --grid even"),
        (["--solver", "cps", "--grid", "stock"], "--solver: cps needs --grid even and at least 2 --steps"),
        (["--grid", "stock", "--shift", "3"], "--shift: needs --grid even"),
    ):
        words = ["--model", tiny_pipelines("sd3"), "--lora", tmp_path / "sd3" / "lora", *SIZE[:4]]
        words += ["--prompts", tmp_path / "two.txt", "--out", tmp_path / "none", *more]
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_full_export_can_be_used_as_a_model(pipeline, prompts, tmp_path):
    model = registry.load_model(pipeline, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for weight in model.denoiser.parameters():
            weight.mul_(1.1)
    model.pipeline.save_pretrained(tmp_path / "step_3")
    (tmp_path / "step_3" / "call.json").write_text((pipeline / "call.json").read_text())
    out = tmp_path / "out"
    code = main(["--pipeline", tmp_path / "step_3", "--prompts", prompts, "--out", out, *SIZE, "--batch", "3"])
    assert code == 0
    got = np.stack([np.asarray(Image.open(out / r["file"])) for r in lines(out)])
    wanted = [Prompt(id=r["prompt"], text=r["prompt"]) for r in lines(out)]
    assert np.array_equal(got, drawn_by(model, wanted, [0]))


def test_non_finite_samples_of_a_broken_model_are_marked_as_failed(pipeline, prompts, tmp_path, capsys):
    model = registry.load_model(pipeline, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        next(model.denoiser.parameters()).fill_(float("nan"))
    model.pipeline.save_pretrained(tmp_path / "broken")
    arguments = ["--model", tmp_path / "broken", "--prompts", prompts, "--out", tmp_path / "out", *SIZE]
    assert main(arguments) == 0
    assert {r["failure"] for r in lines(tmp_path / "out")} == {"non-finite latents: this sample is invalid"}
    assert capsys.readouterr().err.count("non-finite latents") == 3
    assert (tmp_path / "out" / "index.html").read_text().count('class="failed"') == 3


@check_each(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "/nowhere does not exist"),
        (["--lora", "/nowhere"], "/nowhere has no model.safetensors"),
        (["--prompts", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["--prompts", "prompts.csv"], "neither a .txt"),
        (["--width", "33"], "width must be a multiple of"),
        (["--guidance-low", "2"], "--guidance-low: needs --guidance above 1"),
        (["--guidance", "3", "--guidance-low", "2"], "has no second expert"),
        (["--attention", "flash"], "--attention: flash is not installed: install flash-attn"),
        (["--guardrail", "off"], "has no guardrail; remove --guardrail"),
        (["--frames", "5"], "sd3 makes images: num_frames must be 1, got 5"),
        (["--frames", "5", "--first-frame", "/nowhere.png"], "/nowhere.png is not an image"),
        (["--first-frame", "a.png"], "needs --frames above 1"),
        (["--device", "warp:9"], "--device warp:9 cannot be used"),
        (["--out", "/dev/null/out"], "/dev/null/out"),
    ],
)
def test_invalid_requests_are_one_line_with_exit_code_2(pipeline, prompts, tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    given = ["--model", pipeline, "--prompts", prompts, "--out", out, *SIZE, *arguments]
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert message in said.err
    assert said.out == ""
    assert not out.exists()


def test_a_folder_with_files_is_not_changed(pipeline, prompts, tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert main(["--model", pipeline, "--prompts", prompts, "--out", tmp_path, *SIZE]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["precious.txt"]


@check_each(
    ("arguments", "message"),
    [
        (["--guidance", "0.5"], "'0.5' is not a number >= 1"),
        (["--guidance", "nan"], "'nan' is not a number >= 1"),
        (["--fps", "0"], "'0' is not a number > 0"),
        (["--fps", "inf"], "'inf' is not a number > 0"),
        (["--seeds", "-1"], "'-1' is not an integer >= 0"),
        (["--seeds", str(2**64)], "'18446744073709551616' is above the largest seed 18446744073709551615"),
        (["--batch", "0"], "'0' is not a positive integer"),
        (["--pipeline", "x", "--model", "m"], "not allowed with argument --pipeline"),
        (["--lora", "y", "--pipeline", "x"], "--lora: not allowed with --pipeline"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(arguments, message, capsys):
    model = [] if "--pipeline" in arguments else ["--model", "m"]
    assert main([*model, "--prompts", "p.txt", "--out", "o", *SIZE, *arguments]) == 2
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert message in said


HUNGRY = """
import torch

from wfm_ds.models.sd3 import StableDiffusion3


class Hungry(StableDiffusion3):
    def denoise(self, latents, sigma, conditioning, expert=None):
        torch.empty(2**50, dtype=torch.uint8)  # more than an address space
        return super().denoise(latents, sigma, conditioning, expert)
"""
SMALLER = "--height, --width or --frames"
LIGHTER = ["--guidance-batch separate", "--batch below 3", "--vae-dtype bfloat16", "--dtype bfloat16"]


def test_too_little_memory_is_one_line_with_the_options_that_help(pipeline, prompts, tmp_path, capsys, monkeypatch):
    (tmp_path / "hungry_family.py").write_text(HUNGRY)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--model", pipeline, "--family", "hungry_family:Hungry", "--prompts", prompts, *SIZE]

    def told(*more):
        assert main([*words, "--out", tmp_path / "out", *more]) == 2
        (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert said.startswith(
            "error: out of memory on cpu: requested 1048576.0 GiB more, the peak of the process was "
        )
        return said.partition("; change ")[2].split(", or ")

    assert told("--guidance", "2", "--guidance-batch", "joint", "--batch", "3") == [*LIGHTER, SMALLER]
    assert told("--vae-dtype", "bfloat16", "--dtype", "bfloat16") == [SMALLER]
