"""`wfm init`: the written recipes fit the data, load without errors, and explain their values."""

import json
import os
import pty
import re
import shlex
import shutil
import sys

import pytest
import yaml
from PIL import Image

from clips import write_clip
from commands import wfm_command
from each_case import check_each
from wfm_ds.cli.init import dialog, sections
from wfm_ds.cli.init.data_summary import DataSummary
from wfm_ds.cli.init.model_summary import PipelineSummary, read_pipeline
from wfm_ds.cli.main import main
from wfm_ds.demos.room_data import write_room
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.demos.tiny_data import write_action_clips
from wfm_ds.models import registry
from wfm_ds.models.assets.released_repos import RELEASED_REPOS
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.shipped_recipes import schema_modeline
from wfm_ds.recipe.tiny import find_tiny_family
from wfm_reward import registry as rewards


@pytest.fixture
def pictures(tmp_path):
    """Return a function that writes captioned images of these sizes (width, height) and returns their folder."""

    def write(*sizes):
        folder = tmp_path / "pictures"
        folder.mkdir()
        for i, size in enumerate(sizes):
            Image.new("RGB", size, (9 * i, 80, 200)).save(folder / f"{i}.png")
            (folder / f"{i}.txt").write_text(f"picture {i}")
        return folder

    return write


def test_aspect_ratios_differ_from_a_factor_of_four_thirds_on():
    sizes = ((100, 130), (130, 100), (100, 140), (140, 100))
    assert [sections.has_other_shape(size, (100, 100)) for size in sizes] == [False, False, True, True]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(*words)`: run `wfm init` in an empty folder. Return the exit code and the output."""
    monkeypatch.chdir(tmp_path)

    def run_command(*words):
        code = wfm_command("init")(words)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run_command


@pytest.fixture
def init(run, tmp_path):
    """`init(*words)`: write a recipe. Return the recipe mine.yaml and the output."""

    def write(*words):
        code, said = run(*words)
        assert code == 0, said
        return recipe_file.load_recipe(tmp_path / "mine.yaml"), said

    return write


@pytest.fixture
def refused(run):
    """`refused(*words)`: run a command that fails with exit code 2. Return its output."""

    def fail(*words):
        code, said = run(*words)
        assert code == 2, said
        return said

    return fail


def test_media_of_one_shape_get_the_pipelines_own_size(init, pictures, tmp_path):
    recipe, said = init("--data", pictures((64, 64), (80, 72), (70, 64)), "--model", "tiny:sd3")
    assert "data: 3 images, 64 x 64 to 80 x 72" in said
    assert "next: wfm check mine.yaml" in said
    assert (tmp_path / "mine.yaml").read_text().startswith(f"{schema_modeline()}\n# Written")  # for editors
    assert (recipe.data.kind, recipe.algorithm.name, recipe.lora.rank) == ("folder", "sft", 32)
    assert (recipe.sampling.height, recipe.sampling.width, recipe.data.buckets) == (32, 32, None)


def test_media_of_other_shapes_get_buckets(init, pictures):
    recipe, _ = init("--data", pictures((64, 64), (200, 64), (64, 200)), "--model", "tiny:sd3", "--full")
    assert recipe.data.buckets == "auto"
    assert recipe.lora is None


def test_media_that_are_too_small_get_a_size_that_they_fill(init, pictures, tmp_path):
    """At 512 x 768, images of 130 x 130 would be enlarged more than twice."""
    folder = pictures(*[(130, 130)] * 3)
    (tmp_path / "large").mkdir()
    for part in registry.resolve_pipeline("tiny:sd3").iterdir():
        if part.name != "call.json":
            (tmp_path / "large" / part.name).symlink_to(part)
    (tmp_path / "large" / "call.json").write_text('{"height": 512, "width": 768, "guidance_scale": 3.0}')
    recipe, _ = init("--data", folder, "--model", tmp_path / "large")
    # 512 x 768 scaled by 130 / 768, rounded to multiples of 32
    assert (recipe.sampling.height, recipe.sampling.width) == (64, 128)
    assert recipe.sampling.guidance_scale == 3.0


@check_each(
    ("family", "more", "guidance"),
    [
        ("flux2", {}, 4.0),
        ("flux2", {"is_distilled": True}, 1.0),
        ("flux2_dev", {}, 1.0),  # its guidance is embedded
        ("flux_kontext", {}, 1.0),
        ("qwen_image", {}, 4.0),
        ("z_image", {}, 6.0),
    ],
)
def test_a_pipeline_that_states_no_size_has_that_of_its_family(tmp_path, family, more, guidance):
    for part in registry.resolve_pipeline(f"tiny:{family}").iterdir():
        if part.name not in ("call.json", "model_index.json"):
            (tmp_path / part.name).symlink_to(part)
    index = json.loads((registry.resolve_pipeline(f"tiny:{family}") / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | more))
    found = read_pipeline(str(tmp_path))
    assert (found.height, found.width, found.guidance_scale) == (1024, 1024, guidance)


def test_videos_are_for_video_models(refused, init, tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    write_clip(folder / "a.mp4", size=(64, 64))
    (folder / "a.txt").write_text("it fades")
    assert "contains videos" in refused("--data", folder, "--model", "tiny:sd3")
    recipe, _ = init("--data", folder, "--model", "tiny:wan21")
    assert recipe.sampling.num_frames > 1


def test_prompts_and_a_reward_make_a_recipe_that_check_takes(refused, init, tmp_path, capsys):
    (tmp_path / "some.txt").write_text("a red circle\na blue square\n")
    recipe, said = init("--data", "some.txt", "--model", "tiny:sd3", "--rl", "jpeg_compressibility")
    assert "data: 2 prompts" in said
    assert recipe.rl.reward.functions[0].name == "jpeg_compressibility"
    assert recipe.rl.rollout.prompts_per_step == 2
    assert recipe.validation.held_out_rewards == []  # two prompts are too few for the reward hacking alarm
    words = ("--data", "some.txt", "--model", "tiny:sd3", "--rl", "pickscore", "--force")
    for more, sentence in (
        (("--held-out", "clipscore"), "has 2 prompts, but the alarm against reward hacking needs 5"),
        (("--held-out", "pickscore"), "the run trains on this reward"),
        (("--prompt", "a"), "--prompt has no effect, because some.txt has 2 prompts"),
    ):
        assert sentence in refused(*words, *more)
    os.rename("some.txt", "ocr.txt")  # `ocr` is also the name of a published prompt set
    recipe, _ = init("--data", "ocr.txt", "--model", "tiny:sd3", "--rl", "jpeg_compressibility", "--force")
    assert (recipe.data.name, recipe.data.split) == ("ocr_prompts", "ocr")
    assert main(["check", "mine.yaml", "--gpus", "2"]) == 0
    assert "ready: 2 processes" in capsys.readouterr().out


def test_prompts_make_a_recipe_that_distills_to_few_steps(refused, init, tmp_path, capsys):
    (tmp_path / "ocr.txt").write_text("a red circle\na blue square\n")
    words = ("--data", "ocr.txt", "--task", "distill", "--force")
    recipe, _ = init(*words, "--model", "tiny:sd3")
    assert recipe.reward is None
    assert recipe.sampling.eval_steps == recipe.sampling.steps == 4
    assert recipe.algorithm.teacher.guidance_scale == 7.0  # default of the pipeline
    assert main(["check", "mine.yaml", "--gpus", "2"]) == 0
    assert "teacher                    base, guidance 7" in capsys.readouterr().out
    assert "--full: distillation trains only a LoRA" in refused(*words, "--model", "tiny:sd3", "--full")


def copy_pipeline(folder, family, file, **changes):
    """Write a copy of a tiny pipeline to an empty folder, with other values in one of its JSON files."""
    shutil.copytree(registry.resolve_pipeline(f"tiny:{family}"), folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes))


def test_a_student_has_a_shift_if_the_scheduler_has_none(init, tmp_path, capsys):
    (tmp_path / "some.txt").write_text("a red circle\na blue square\n")
    scheduler = "scheduler/scheduler_config.json"
    copy_pipeline(tmp_path / "model", "cosmos25", scheduler, use_karras_sigmas=True)  # as the released model
    recipe, _ = init("--data", "some.txt", "--task", "distill", "--model", "model")
    assert (recipe.sampling.grid_shift, recipe.algorithm.levels.shift) == (5.0, 5.0)
    assert main(["check", "mine.yaml", "model.guardrail=off"]) == 0
    assert "all checks passed" in capsys.readouterr().out


@check_each(
    ("family", "file", "changes", "message"),
    [
        ("wan22", "model_index.json", {}, "has two experts, which distillation does not support"),
        ("flux2", "model_index.json", {"is_distilled": True}, "is distilled to 4 steps already"),
        ("sd3", "call.json", {"num_inference_steps": 3, "guidance_scale": 1.0}, "is distilled to 3 steps already"),
    ],
)
def test_a_model_that_dmd2_cannot_distill_is_refused(refused, tmp_path, family, file, changes, message):
    (tmp_path / "some.txt").write_text("a red circle\na blue square\n")
    copy_pipeline(tmp_path / "model", family, file, **changes)
    assert message in refused("--data", tmp_path / "some.txt", "--task", "distill", "--model", tmp_path / "model")


@check_each(
    ("model", "reward", "held_out"),
    [
        ("sd3", "pickscore", "clipscore"),
        ("sd3", "clipscore", "pickscore"),
        ("wan21", "video_align", "motion"),
        ("wan21", "motion", "consistency"),
        ("wan21", "pickscore", "motion"),  # scores some frames of each video
    ],
)
def test_an_rl_recipe_can_raise_the_alarm(init, tmp_path, model, reward, held_out):
    (tmp_path / "some.txt").write_text("".join(f"prompt {i}\n" for i in range(40)))
    recipe, _ = init("--data", tmp_path / "some.txt", "--model", f"tiny:{model}", "--rl", reward, "--force")
    assert [one.name for one in recipe.validation.held_out_rewards] == [held_out]
    assert recipe.validation.num_prompts == 32


def test_every_value_has_a_comment_with_its_reason(init, pictures, tmp_path):
    init("--data", pictures((64, 64)), "--model", "tiny:sd3", "--prompt", 'one: "caption" #1')
    text = (tmp_path / "mine.yaml").read_text()
    assert yaml.safe_load(text)["data"]["prompt"] == 'one: "caption" #1'
    assert "height: 32  # default of the pipeline" in text


def test_user_errors_are_one_line_and_write_nothing(init, refused, pictures, tmp_path):
    folder = pictures((64, 64))
    for words, sentence in (
        (("--data", "nowhere", "--model", "tiny:sd3"), "nowhere not found. For a dataset"),
        (("--data", folder, "--model", "tiny:none"), "none is not a tiny pipeline"),
        (("--data", folder, "--model", "tiny:qwen25vl"), "tiny:qwen25vl is a vision-language model: use data.kind"),
        (
            ("--data", folder, "--model", "tiny:sd3", "--rl", "ocr"),
            "RL of tiny:sd3 (sd3, StableDiffusion3Pipeline) nee",
        ),
        (("--data", folder, "--model", "tiny:sd3", "--task", "dpo"), "do not fit --task dpo"),
        (("--data", folder, "--model", "tiny:sd3", "--task", "rl"), "--rl is missing"),
        (("--data", folder, "--model", "tiny:sd3", "--task", "sft", "--rl", "ocr"), "contradict each other"),
        (("--data", folder, "--model", "tiny:sd3", "--held-out", "acr"), "unknown reward 'acr'; did you mean ocr?"),
        (("--data", folder, "--model", "tiny:sd3", "--prompt", " "), "--prompt is blank"),
        (("--data", folder, "--model", "tiny:sd3", "--media-path", "x"), "--media-path has no effect"),
        (("--data", folder, "--model", "tiny:sd3", "--out", folder, "--force"), "is a folder: name a file with --out"),
        (("--data", folder), "--model is missing"),
        (("--model", "tiny:sd3"), "--data is missing"),
        (("--data", folder, "--model", "tiny:sd3", "--out", "no/mine.yaml"), "folder no not found"),
    ):
        said = refused(*words)
        assert sentence in said
        assert said.count("\n") == 1
    assert not list(tmp_path.glob("*.yaml"))
    (tmp_path / "mine.yaml").write_text("mine")
    refused("--data", folder, "--model", "tiny:sd3")
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    init("--data", folder, "--model", "tiny:sd3", "--force")


def test_required_inputs_of_a_model_are_named(init, tmp_path):
    write_room(tmp_path / "room")
    recipe, _ = init("--data", tmp_path / "room" / "clips", "--model", "tiny:sana_wm")
    assert sorted(recipe.data.inputs) == ["c2w", "intrinsics"]
    assert recipe.algorithm.conditioning_frame_range == (1, 1)


def test_image_to_video_models_get_conditioning_clips(refused, init, pictures, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    write_clip(clips / "0.mp4", count=12, size=(32, 32))
    (clips / "0.txt").write_text("a clip")
    recipe, _ = init("--data", clips, "--model", "tiny:wan22_i2v")
    assert recipe.algorithm.conditioning_frame_range == (1, 1)
    (tmp_path / "p.txt").write_text("a cat\n")
    folder = pictures((64, 64))
    for words in (("--data", tmp_path / "p.txt", "--rl", "motion"), ("--data", folder)):
        assert "start with" in refused(*words, "--model", "tiny:wan22_i2v", "--force")
    recipe, _ = init("--data", folder, "--rl", "motion", "--model", "tiny:wan22_i2v", "--force")
    assert (recipe.data.kind, recipe.algorithm.conditioning_frame_range) == ("folder", (1, 1))


def test_control_videos_are_inputs_without_conditioning_frames(init, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    (clips / "0.txt").write_text("a clip")
    for name in ("0", "0.control", "0.control_mask"):
        write_clip(clips / f"{name}.mp4", count=12, size=(32, 32))
    for words in ((), ("--rl", "motion")):
        recipe, _ = init("--data", clips, "--model", "tiny:wan_vace", "--force", *words)
        assert recipe.data.inputs == ["control", "control_mask"]
        assert recipe.algorithm.conditioning_frame_range == (0, 0)


def write_pairs(folder, count=8):
    folder.mkdir()
    for i in range(count):
        for name in ("good", "bad"):
            Image.new("RGB", (48, 48), (9 * i, 80, 200)).save(folder / f"{i}_{name}.png")
    rows = [{"prompt": f"picture {i}", "chosen": f"{i}_good.png", "rejected": f"{i}_bad.png"} for i in range(count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pairs.jsonl"


def test_pairs_are_for_dpo(init, tmp_path):
    recipe, said = init("--data", write_pairs(tmp_path / "pairs"), "--model", "tiny:sd3")
    assert "data: 8 pairs of images, 48 x 48 to 48 x 48" in said
    assert (recipe.data.kind, recipe.algorithm.name, recipe.optimizer.lr) == ("pairs", "dpo", 1e-5)


def test_conversations_are_for_vision_language_models(refused, init, tmp_path):
    write_squares(tmp_path / "squares")
    for number, data in enumerate(("squares", "squares/annotations.json")):
        recipe, said = init("--data", data, "--model", "tiny:qwen25vl", "--out", "mine.yaml", "--force")
        assert "data: 40 conversations with images" in said
        assert (recipe.data.kind, recipe.data.media_path, recipe.algorithm.name) == ("llava", "squares", "vlm_sft")
        assert (recipe.data.path, number) == ("squares/annotations.json", number)
    (tmp_path / "squares" / "annotations.json").rename("alone.json")
    assert "name the folder of the images with --media-path" in refused(
        "--data", "alone.json", "--model", "tiny:qwen25vl", "--force"
    )
    recipe, _ = init("--data", "alone.json", "--media-path", "squares", "--model", "tiny:qwen25vl", "--force")
    assert recipe.data.media_path == "squares"
    for more, sentence in ((("--media-path", "none"), "not found in none"), (("--held-out", "ocr"), "has no effect")):
        words = ("--data", "alone.json", "--media-path", "squares", "--model", "tiny:qwen25vl", "--force")
        assert sentence in refused(*words, *more)
    assert "sd3 is not a tiny vision-language model" in refused(
        "--data", "alone.json", "--media-path", "squares", "--model", "tiny:sd3", "--force"
    )


def test_videos_with_actions_train_all_weights_from_the_first_frame(refused, init, tmp_path):
    write_action_clips(tmp_path / "clips")
    recipe, _ = init("--data", "clips", "--model", "tiny:cosmos3")
    assert (sorted(recipe.data.inputs), recipe.lora, recipe.algorithm.name) == (["actions", "domain"], None, "sft")
    assert recipe.algorithm.conditioning_frame_range == (1, 1)
    assert recipe.data.max_upscale > 2  # the clips have 16 x 8 pixels
    recipe, _ = init("--data", "clips", "--model", "tiny:cosmos3", "--rl", "brightness", "--lora", "--force")
    assert recipe.rl.rollout.trajectories == "shuffle"
    recipe, _ = init("--data", "clips", "--model", "tiny:wan21", "--force")  # knows no actions
    assert (recipe.data.inputs, recipe.lora is None) == ([], False)
    assert "does not accept actions" in refused(
        "--data", "clips", "--model", "tiny:wan21", "--task", "actions", "--force"
    )


@check_each(
    ("counts", "default", "expected"), [([90, 90], 81, 81), ([30] * 8, 81, 25), ([8, 9], 5, 5), ([7] * 3, 9, 5)]
)
def test_clips_that_are_too_short_shorten_the_samples(tmp_path, counts, default, expected):
    model = PipelineSummary("m", "m", True, 64, 64, default, 5.0)
    data = DataSummary(
        path=tmp_path,
        content="media",
        description="",
        num_samples=len(counts),
        recipe_path="m",
        sizes=[(64, 64)] * len(counts),
        frame_counts=counts,
    )
    request = sections.RecipeRequest(task="sft", data=data, model_path="m", trains_all_weights=False, out=tmp_path)
    (line,) = sections.frame_lines(request, model)
    assert (line.value, line.comment == "default of the pipeline") == (expected, expected == default)


def test_a_distilled_model_is_validated_in_its_own_number_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "resolve_pipeline", lambda path, **_: locate("tiny:z_image"))
    locate, path = registry.locate_pipeline, "Tongyi-MAI/Z-Image-Turbo"
    model = read_pipeline(path)
    assert (model.num_steps, model.guidance_scale) == (8, 1.0)
    data = DataSummary(
        path=tmp_path, content="media", description="", num_samples=9, recipe_path="m", sizes=[(64, 64)] * 9
    )
    common = {"data": data, "model_path": path, "trains_all_weights": False, "out": tmp_path}
    sft = sections.RecipeRequest(task="sft", **common)
    rl = sections.RecipeRequest(task="rl", reward="brightness", **common)
    for made, keys in (
        (sections.create_supervised_sections(sft, model), {"eval_steps": 8, "guidance_scale": 1.0}),
        (sections.create_rl_sections(rl, model), {"steps": 8, "eval_steps": 8}),
    ):
        assert keys.items() <= {line.key: line.value for line in made["sampling"]}.items()


def test_videos_of_a_few_frames_are_refused(refused, tmp_path):
    (tmp_path / "clips").mkdir()
    write_clip(tmp_path / "clips" / "0.mp4", count=4, size=(64, 64))
    (tmp_path / "clips" / "0.txt").write_text("it fades")
    assert "most videos have only 4 frames" in refused("--data", "clips", "--model", "tiny:wan21")


@check_each(("count", "share"), [(8, 0.2), (320, 0.1), (5000, 0.05)])
def test_about_32_samples_are_held_out_if_there_are_enough(count, share):
    assert sections.holdout_line(count).value == share


def test_a_single_sample_is_not_held_out():
    assert sections.holdout_line(1).comment.startswith("about 0 of 1")


def test_every_suggestion_exists():
    for model in {name for names in dialog.MODELS.values() for name in names}:
        assert find_tiny_family(model)
        assert model.startswith("tiny:") or model in RELEASED_REPOS or model in dialog.MODELS["conversations"]
    for suggestions in (dialog.REWARDS, dialog.HELD_OUT_REWARDS):
        for kind, names in suggestions.items():
            assert all(kind in rewards.get_reward_class(name).media_types for name in names)


# ---- questions


@pytest.fixture
def answer(monkeypatch):
    """`answer(*lines)`: put lines on the terminal from which the command reads."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb", buffering=0) as keyboard, os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield lambda *lines: keyboard.write("".join(f"{line}\n" for line in lines).encode())


def test_questions_have_defaults_and_give_the_equivalent_command(init, pictures, tmp_path, answer):
    folder = pictures((64, 64))
    answer("nowhere", folder, "", "9", "5", "", "")
    recipe, said = init()
    assert "nowhere not found" in said  # asks again
    assert "  1  sft  fine-tune on the images or videos\n  2  rl   improve a reward\nNumber [1]: " in said
    assert "'9' is not a number from 1 to 5" in said
    assert (recipe.model.path, recipe.algorithm.name, recipe.lora.rank) == ("tiny:sd3", "sft", 32)
    written = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "mine.yaml").unlink()
    line = re.search(r"The same without questions:\n  wfm init (.*)", said)[1]
    init(*shlex.split(line))
    assert (tmp_path / "mine.yaml").read_text() == written
    answer("")
    _, said = init("--data", folder, "--model", "tiny:sd3", "--held-out", "clipscore", "--full", "--out", "b.yaml")
    assert " --held-out clipscore " in said


def test_rewards_are_asked_for(init, tmp_path, answer):
    (tmp_path / "some.jsonl").write_text("".join(f'{{"prompt": "a sign {i}", "label": 3}}\n' for i in range(9)))
    answer("", "tiny:sd3", "1", "", "2")  # the first answer is the task
    recipe, said = init("--data", "some.jsonl", "--out", "mine.yaml")
    assert recipe.rl.reward.functions[0].name == "digits"  # it reads `label`, so it is the first one
    assert [one.name for one in recipe.validation.held_out_rewards] == ["clipscore"]
    assert recipe.lora is None
    answer("2", "")
    recipe, said = init("--data", "some.jsonl", "--model", "tiny:sd3", "--rl", "pickscore", "--full", "--force")
    assert "mine.yaml" in said.split("Recipe file to write")[1]
    assert recipe.validation.held_out_rewards == []


def test_yes_skips_questions_and_a_closed_terminal_writes_nothing(refused, init, pictures, tmp_path, answer):
    folder = pictures((64, 64))
    answer("\x04")
    assert "nothing was written" in refused("--data", folder, "--model", "tiny:sd3")
    assert not list(tmp_path.glob("*.yaml"))
    init("--data", folder, "--model", "tiny:sd3", "--yes")
