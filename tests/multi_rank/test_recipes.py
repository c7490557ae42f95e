"""Train two steps of each shipped recipe with --tiny, and of each algorithm on each model family."""

import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from clips import write_clip
from each_case import check_each
from families import CASES
from multi_rank.exports import assert_all_steps_taken, assert_draws, assert_loads, assert_trained
from multi_rank.resuming import train_on_rank
from shipped import SHIPPED
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.models.tiny import FAMILIES
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes


def is_sharded(engine):
    return engine.deepspeed.startswith("zero3") or engine.sequence_parallel > 1


TESTS = Path(__file__).parent.parent
COLORS = TESTS.parent / "recipes" / "prompts" / "colors"
OFTEN = ("cp_nft", "sd3_image_sft_lora")  # these also run in the default tier
SHARDED = [name for name, recipe in SHIPPED.items() if is_sharded(recipe.engine)]
# The recipes for edits differ in few settings. Of these nine recipes, .ci/run runs only two.
EDITS = {name for name, recipe in SHIPPED.items() if recipe.data.image_inputs and "/" not in name}
# Variants of other recipes; they run weekly.
VARIANTS = {"cp_video_nft", "cp_i2v_nft", "wan_14b_video_nft", "wan_video_nft", "wan22_ti2v_video_nft"}
VARIANTS |= {"sd3_dance_grpo", "sd3_flow_dppo", "sd3_flow_grpo_fast", "sd3_mix_grpo", "sd3_nft_async", "sd3_ram"}
LONG = {*SHARDED, *EDITS, *VARIANTS} - {"qwen_image_edit_nft", "flux_kontext_nft"}
IN_CI = ("_nft", "_sft", "_sft_lora", "wan22_i2v_flow_grpo")
# Kinds of runs without a shipped recipe.
OTHERS = (
    "sana_wm_flow_grpo",
    "sana_wm_sft",
    "sd3_ddrl",
    "sd3_dgpo",
    "sd3_dmd2",
    "sd3_opd",
    "wan22_ti2v_flow_grpo",
    "wan21_video_sft",
    "wan_vace_nft",
    "wan_vace_sft",
)
SHORT = [
    "run.steps=2",
    "sampling.eval_steps=1",
    "validation.every=0",
    "validation.at_start=false",
    "validation.num_prompts=1",
    "logging.console=false",
]
# {algorithm: recipe in tests/recipes for every family}. AWM and RAM are omitted: only their loss differs from NFT.
BASE = {"sft": "wan_sft_lora", "dpo": "sd3_dpo", "nft": "sd3_nft", "flow_grpo": "sd3_flow_grpo", "ddrl": "sd3_ddrl"}
PAIRED = {"sft", "ddrl"}
# Every family trains with every algorithm. SFT and NFT alternate between full weights and LoRA from family to family.
ADAPTERS = [(algorithm, "lora") for algorithm in ("flow_grpo", "ddrl", "dpo")]
KINDS = [
    [("sft", "full"), ("nft", "lora"), *ADAPTERS],
    [("sft", "lora"), ("nft", "full"), *ADAPTERS],
]
# Shipped recipes cover LoRA with NFT and Flow-GRPO; the matrix adds full SFT and its samples.
FEW = {name: [("sft", "full")] for name in ("flux2", "flux_kontext", "qwen_image", "z_image")}
FEW |= {"flux2_dev": []}  # differs from flux2 only in guidance and text encoder
# The quickstart models are an SD3, a Wan 2.1, a Cosmos3 and a FLUX.2.
FEW |= {"digits": [], "moving": [], "world": [], "edits": []}
FEW |= {"wan21_i2v": [], "wan22_i2v": []}  # need conditioning images; shipped recipes train them
FEW |= {"qwen_image_edit": [], "qwen_image_edit_plus": []}  # need source images, which the matrix data lack
FEW |= {"ltx2": [("nft", "lora"), ("flow_grpo", "lora")]}  # only these algorithms train video with sound
# These need cameras, control videos or actions, which the matrix data lack.
FEW |= {"sana_wm": [], "wan_vace": [], "cosmos25_actions": []}
# Losses do not depend on the family. In .ci/run, all algorithms train one family each of images, of videos and of two
# experts. The other families train in shipped recipes.
ALWAYS = {"sd3", "cosmos3", "wan22"}
MATRIX = [
    pytest.param(*kind, family, marks=[] if family in ALWAYS else [pytest.mark.long])
    for i, family in enumerate(FAMILIES)
    for kind in FEW.get(family, KINDS[i % 2])
]
EVAL_STEPS = 3  # reaches both experts of Wan 2.2
SMALL_GROUPS = ["rollout.group_size=2", "reward.functions=[{name: jpeg_compressibility}]"]
CHANGES = {
    "sft": ["sampling.guidance_scale=1", f"sampling.eval_steps={EVAL_STEPS}", "logging.num_samples=1"],
    "dpo": [],
    "nft": SMALL_GROUPS,
    "flow_grpo": SMALL_GROUPS,
    "ddrl": [*SMALL_GROUPS, "algorithm.train_on=[0, 1, 2, 3]"],  # reaches both experts of Wan 2.2
}


def train_and_keep_pictures(recipe, overrides, kept):
    """Train, and save the last generated image or video to the file `kept`, before compression."""
    from wfm_ds.models.sampler import PendingPixels

    wait = PendingPixels.wait

    def keep(self):
        pictures, finite = wait(self)
        if len(pictures):  # a rank of a replica may have no samples to decode
            np.save(kept, pictures[-1])
        return pictures, finite

    with mock.patch.object(PendingPixels, "wait", keep):
        return train_on_rank(recipe, overrides)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Return {data.path in a recipe: folder with such data}."""
    from wfm_ds.demos.actions_data import write_clip as write_brightness_clip
    from wfm_ds.demos.digits_data import write_digits
    from wfm_ds.demos.room_data import write_room
    from wfm_ds.demos.tiny_data import write_controls

    folder = tmp_path_factory.mktemp("media")
    write_digits(folder / "digits")
    write_room(folder / "room")
    write_controls(folder / "controls")
    (folder / "brightness").mkdir()
    for i in range(4):
        write_brightness_clip(folder / "brightness", i, wrong=0.0)
    (folder / "clips").mkdir()
    for i in range(3):
        # The clips must differ: DPO learns nothing from a pair of equal clips.
        pictures = np.random.default_rng(i).integers(0, 256, (40, 8, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
        write_clip(folder / "clips" / f"{i}.mp4", size=(64, 64), pictures=pictures)
        (folder / "clips" / f"{i}.json").write_text(json.dumps({"prompt": f"fade number {i}"}))
    return {
        "outputs/digits/images": folder / "digits" / "images",
        "outputs/digits/pairs.jsonl": folder / "digits" / "pairs.jsonl",
        "outputs/clips.jsonl": clip_pairs(folder),
        "outputs/clips": folder / "clips",
        "outputs/room/clips": folder / "room" / "clips",
        "outputs/controls/target": folder / "controls" / "target",
        "outputs/controls/control": folder / "controls" / "control",
        "outputs/brightness/clips": folder / "brightness",
        "recipes/prompts/colors": COLORS,
    }


def clip_pairs(folder):
    """Write a table of clip pairs."""
    names = [f"clips/{i}.mp4" for i in range(3)]
    pairs = [(a, b) for a in names for b in names if a != b]
    lines = [json.dumps({"prompt": f"fade {a}", "chosen": a, "rejected": b}) for a, b in pairs]
    (folder / "clips.jsonl").write_text("\n".join(lines))
    return folder / "clips.jsonl"


@pytest.fixture
def run(one_rank, two_ranks, tiny_pipelines, media, tmp_path):
    """Return a function that trains a recipe for two steps on one replica, and returns (export, pipeline, family).

    Without `family` it uses the recipe's own family.
    """

    def run(path, *overrides, family=None, data=None):
        recipe = recipe_file.load_recipe(path, overrides)
        family = family or recipe.model.path.removeprefix("tiny:")
        places = [f"run.output_dir={tmp_path / 'out'}", f"model.path={tiny_pipelines(family)}"]
        places += [f"data.path={media[data or recipe.data.path]}"]
        if recipe.validation.path is not None:
            places.append(f"validation.path={media[recipe.validation.path]}")
        held_out = [] if recipe.is_rl else ["validation.num_images=1"]
        words = [*places, *SHORT, *held_out, *overrides]
        ranks = {1: one_rank, 2: two_ranks}[recipe.engine.sequence_parallel]
        kept = str(tmp_path / "pictures.npy")
        outcome = ranks.run(train_and_keep_pictures, recipe=str(path), overrides=words, kept=kept)[0]
        assert (outcome["status"], outcome["step"]) == ("finished", 2)
        sizes = derive_run_sizes(recipe_file.load_recipe(path, words), ranks.num_ranks)
        assert_all_steps_taken(tmp_path / "out", 2 * sizes.updates_per_step)
        return tmp_path / "out" / "safetensors" / "step_2", tiny_pipelines(family), family

    return run


def train_tiny_on_rank(name, overrides):
    """Run `wfm_ds.train NAME --tiny` on this rank. Return its outcome, model path and number of updates."""
    from wfm_ds import train
    from wfm_ds.demos.tiny_data import load_tiny_recipe
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.runs.shutdown import RunShutdown

    world = World.join()
    recipe = load_tiny_recipe(Path(name), overrides, world_size=world.size)
    outcome, _ = train.prepare_and_train(recipe, world, StopFlag(), RunShutdown(world))
    return {
        **{"status": outcome.status, "step": outcome.step, "model": recipe.model.path},
        "updates": recipe.run.steps * derive_run_sizes(recipe, world.size).updates_per_step,
    }


def assert_tiny_trains(ranks, name, out, *overrides):
    """Assert that a recipe trains two steps with --tiny, and that plain diffusers or transformers loads the export."""
    words = [f"run.output_dir={out}", "optimizer.lr=1e-3", "optimizer.warmup_steps=0", "logging.console=false"]
    words += overrides
    outcome = ranks.run(train_tiny_on_rank, name=name, overrides=words)[0]
    assert (outcome["status"], outcome["step"]) == ("finished", 2)
    export, family = out / "safetensors" / "step_2", outcome["model"].removeprefix("tiny:")
    base = get_tiny_folder(family)
    if SHIPPED[name].algorithm.trains_language:
        network = AutoModelForImageTextToText.from_pretrained(base if (export / "lora").is_dir() else export)
        if (export / "lora").is_dir():
            network.load_adapter(str(export / "lora"))
        return
    assert_all_steps_taken(out, outcome["updates"])
    failures = re.findall(r'"reward/[^"]*/failed": ([^,}]*)', (out / "metrics.jsonl").read_text())
    assert set(map(float, failures)) == ({0.0} if SHIPPED[name].uses_rewards else set())
    assert_trained(export, base, family, more_than=0)
    assert_loads(export, base, family)


def choose_tier(name):
    """Return the marks of a run on one rank. .ci/run trains most families with SFT and NFT, and SD3 with most
    algorithms. Sharded recipes run on two ranks instead."""
    if name in OFTEN:
        return [pytest.mark.unit]
    in_ci = name not in LONG and "history" not in name and (name.startswith("sd3_") or name.endswith(IN_CI))
    return [] if in_ci else [pytest.mark.long]


@pytest.mark.parametrize("name", [pytest.param(name, marks=choose_tier(name)) for name in SHIPPED])
def test_a_shipped_recipe_trains_with_tiny_and_its_export_loads(name, one_rank, tmp_path):
    assert_tiny_trains(one_rank, name, tmp_path / "out")


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.ci_cases(
    *("sd3_image_sft", "wan21_i2v_sft_lora", "wan_14b_dmd2", "wan_long_video_sft_lora", "hunyuan_video15_sft"),
    *("cosmos3_nano_sft", "cosmos3_nano_actions_sft", "cosmos3_super_sft_lora", "reason_llava_sft"),
)
def test_a_recipe_that_shards_its_model_or_samples_trains_with_tiny_on_two_ranks(name, two_ranks, tmp_path):
    assert_tiny_trains(two_ranks, name, tmp_path / "out")


def test_actions_train_with_zero3_and_sequence_parallelism(two_ranks, tmp_path):
    overrides = ("engine.deepspeed=zero3", "engine.sequence_parallel=2")
    assert_tiny_trains(two_ranks, "cp_actions_sft", tmp_path / "out", *overrides)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_runs_train_and_their_exports_load(name, run):
    student = ["sampling.eval_steps=4"] if name == "sd3_dmd2" else []  # dmd2 evaluates at the steps of its rollouts
    result = run(TESTS / "recipes" / f"{name}.yaml", *student)
    assert_trained(*result, more_than=0)
    assert_loads(*result)


@pytest.mark.parametrize(("algorithm", "kind", "family"), MATRIX)
def test_each_algorithm_trains_each_family_and_sft_exports_draw_its_pictures(
    algorithm, kind, family, run, media, tmp_path
):
    case = CASES[family]
    height, width, num_frames = case.size
    overrides = [
        f"sampling.height={height}",
        f"sampling.width={width}",
        f"sampling.num_frames={num_frames}",
        f"model.guardrail={case.load_options.get('guardrail', 'stock')}",
        "lora=null" if kind == "full" else "lora={rank: 4, alpha: 8}",
        "optimizer.lr=1e-2",
        "optimizer.weight_decay=0",
        "ema=null",
        "sampling.eval_solver=ode",  # the plain diffusers pipeline uses the same solver
        *CHANGES[algorithm],
    ]
    data = None
    if algorithm == "dpo":
        data = "outputs/digits/pairs.jsonl" if num_frames == 1 else "outputs/clips.jsonl"
    elif algorithm in PAIRED:
        data = "outputs/digits/images" if num_frames == 1 else "outputs/clips"
    if data is not None:
        overrides += [
            "data.max_upscale=8",
            f"algorithm.max_num_conditional_frames={int(case.conditioning_frames_call is not None)}",
        ]
    path = TESTS / "recipes" / f"{BASE[algorithm]}.yaml"
    result = run(path, *overrides, family=family, data=data)
    assert_trained(*result, more_than=1e-4)
    if algorithm == "sft":
        (sample,) = (tmp_path / "out" / "samples" / "step_2" / "samples.jsonl").read_text().splitlines()
        sample, clip = json.loads(sample), None
        if case.conditioning_frames_call is not None:
            framing = Framing(height=height, width=width, num_frames=num_frames, max_upscale=8)
            clip = load_media(LocalFile(media[data] / f"{sample['prompt_id']}.mp4"), framing, draw_centre)
        frames = np.load(tmp_path / "pictures.npy")
        assert_draws(*result, frames=frames, sample=sample, steps=EVAL_STEPS, clip=clip)


@check_each("name", [name for name in SHIPPED if "/" not in name])
def test_a_full_size_recipe_is_split_across_eight_ranks(name):
    shares = derive_run_sizes(SHIPPED[name], 8)
    assert shares.samples_per_rank * shares.num_replicas == shares.samples_per_step
