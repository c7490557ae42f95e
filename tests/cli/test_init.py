"""`wfm init`: recipes that fit what is there, are read back, and stand for something that trains."""

import json

import pytest
import yaml
from PIL import Image

from clips import write_clip
from each_case import check_each
from wfm_ds.cli import init as command
from wfm_ds.cli.main import main
from wfm_ds.demos.room_data import write_room
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file


@pytest.fixture
def pictures(tmp_path):
    """Returns a function that writes captioned pictures of these sizes (width, height) and returns their folder."""

    def write(*sizes):
        folder = tmp_path / "pictures"
        folder.mkdir()
        for i, size in enumerate(sizes):
            Image.new("RGB", size, (9 * i, 80, 200)).save(folder / f"{i}.png")
            (folder / f"{i}.txt").write_text(f"picture {i}")
        return folder

    return write


def test_shapes_are_far_apart_from_four_thirds_on_either_way():
    assert [command.has_other_shape(size, (100, 100)) for size in ((100, 130), (130, 100), (100, 140), (140, 100))] == [
        *(False, False),
        *(True, True),
    ]


@pytest.fixture
def init(tmp_path, monkeypatch, capsys):
    """Runs `wfm init` with these words in an empty folder; (exit code, the recipe or None, what was said)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main(["init", *map(str, words)])
        said = capsys.readouterr()
        recipe = recipe_file.load_recipe(tmp_path / "mine.yaml") if code == 0 else None
        return code, recipe, said.out + said.err

    return run


def test_media_of_one_shape_get_the_pipelines_own_size(init, pictures):
    code, recipe, said = init("--data", pictures((64, 64), (80, 72), (70, 64)), "--model", "tiny:sd3")
    assert code == 0
    assert "data: 3 images, 64 x 64 to 80 x 72" in said
    assert "next: wfm check mine.yaml" in said
    assert (recipe.data.kind, recipe.algorithm.name, recipe.lora.rank) == ("folder", "sft", 32)
    assert (recipe.sampling.height, recipe.sampling.width, recipe.data.buckets) == (32, 32, None)


def test_media_of_other_shapes_get_buckets(init, pictures):
    _, recipe, _ = init("--data", pictures((64, 64), (200, 64), (64, 200)), "--model", "tiny:sd3", "--full")
    assert recipe.data.buckets == "auto"
    assert recipe.lora is None


def test_media_that_are_too_small_get_a_size_that_they_fill(init, pictures, tmp_path):
    """Of 512 x 768, of which pictures of 130 x 130 fill no half."""
    folder = pictures(*[(130, 130)] * 3)
    (tmp_path / "large").mkdir()
    for part in registry.resolve_pipeline("tiny:sd3").iterdir():
        if part.name != "call.json":
            (tmp_path / "large" / part.name).symlink_to(part)
    (tmp_path / "large" / "call.json").write_text('{"height": 512, "width": 768, "guidance_scale": 3.0}')
    _, recipe, _ = init("--data", folder, "--model", tmp_path / "large")
    assert (recipe.sampling.height, recipe.sampling.width) == (64, 128)  # 512 x 768 by 130 / 768, in multiples of 32
    assert recipe.sampling.guidance_scale == 3.0


@check_each(
    ("family", "more", "guidance"),
    [
        ("flux2", {}, 4.0),
        ("flux2", {"is_distilled": True}, 1.0),
        ("flux2_dev", {}, 1.0),  # its guidance is embedded
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
    found = command.read_pipeline(str(tmp_path))
    assert (found.height, found.width, found.guidance_scale) == (1024, 1024, guidance)


def test_videos_are_for_video_models(init, tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    write_clip(folder / "a.mp4", size=(64, 64))
    (folder / "a.txt").write_text("it fades")
    code, _, said = init("--data", folder, "--model", "tiny:sd3")
    assert code == 2
    assert "contains videos" in said
    code, recipe, _ = init("--data", folder, "--model", "tiny:wan21")
    assert recipe.sampling.num_frames > 1


def test_prompts_and_a_reward_make_a_recipe_that_check_takes(init, tmp_path, capsys):
    (tmp_path / "some.txt").write_text("a red circle\na blue square\n")
    _, recipe, said = init("--data", "some.txt", "--model", "tiny:sd3", "--rl", "jpeg_compressibility")
    assert "data: 2 prompts" in said
    assert recipe.rl.reward.functions[0].name == "jpeg_compressibility"
    assert recipe.rl.rollout.prompts_per_step == 2
    assert main(["check", "mine.yaml", "--gpus", "2"]) == 0
    assert "ready: 2 processes" in capsys.readouterr().out


def test_every_number_says_why(init, pictures, tmp_path):
    init("--data", pictures((64, 64)), "--model", "tiny:sd3", "--prompt", 'one: "caption" #1')
    text = (tmp_path / "mine.yaml").read_text()
    assert yaml.safe_load(text)["data"]["prompt"] == 'one: "caption" #1'
    assert "height: 32  # default of the pipeline" in text


def test_mistakes_are_one_sentence_and_leave_nothing(init, pictures, tmp_path):
    folder = pictures((64, 64))
    for words, sentence in (
        (("--data", "nowhere", "--model", "tiny:sd3"), "nowhere not found. For a dataset"),
        (("--data", folder, "--model", "tiny:none"), "none is not a tiny pipeline"),
        (("--data", folder, "--model", "tiny:sd3", "--rl", "ocr"), "is not a file: with --rl, --data must be"),
        (("--data", folder, "--model", "tiny:sd3", "--out", "no/mine.yaml"), "folder no not found"),
    ):
        code, _, said = init(*words)
        assert code == 2
        assert sentence in said
        assert said.count("\n") == 1
    assert not list(tmp_path.glob("*.yaml"))
    (tmp_path / "mine.yaml").write_text("mine")
    code, _, said = init("--data", folder, "--model", "tiny:sd3")
    assert (code, (tmp_path / "mine.yaml").read_text()) == (2, "mine")
    assert init("--data", folder, "--model", "tiny:sd3", "--force")[0] == 0


def test_inputs_that_a_model_cannot_do_without_are_named(init, tmp_path):
    write_room(tmp_path / "room")
    code, recipe, said = init("--data", tmp_path / "room" / "clips", "--model", "tiny:sana_wm")
    assert code == 0, said
    assert sorted(recipe.data.inputs) == ["c2w", "intrinsics"]
    assert recipe.algorithm.conditioning_frame_range == (1, 1)


def test_a_model_that_begins_with_an_image_gets_clips_that_say_so(init, pictures, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    write_clip(clips / "0.mp4", count=12, size=(32, 32))
    (clips / "0.txt").write_text("a clip")
    code, recipe, said = init("--data", clips, "--model", "tiny:wan22_i2v")
    assert code == 0, said
    assert recipe.algorithm.conditioning_frame_range == (1, 1)
    (tmp_path / "p.txt").write_text("a cat\n")
    for words in (("--data", tmp_path / "p.txt", "--rl", "motion"), ("--data", pictures((64, 64)))):
        code, _, said = init(*words, "--model", "tiny:wan22_i2v", "--force")
        assert (code, "start with" in said) == (2, True)
