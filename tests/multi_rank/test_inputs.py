"""Whole runs of models conditioned on actions or cameras: two ranks against one, workers against colocated rollouts,
counterfactual trajectories, and errors for invalid recipes."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from each_case import check_each
from multi_rank.resuming import tiny_recipe, train_with_own_code
from multi_rank.same_runs import assert_bitwise_equal, assert_same_runs, records
from steered import WIDTH, write_world
from wfm_ds.data.datasets import TrainingData
from wfm_ds.demos.room_data import camera_path, write_room
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.rollout.trajectories import shuffle_trajectories
from wfm_ds.runs.model_loading import load_model
from wfm_ds.training.reward_checks import check_rewards
from wfm_ds.types import Prompt

TESTS = str(Path(__file__).parent.parent)
FRAMES = 5
COMMON = [
    "data.inputs=[actions, domain]",
    f"sampling.num_frames={FRAMES}",
    "optimizer.eps=1e-4",
    "optimizer.lr=3e-2",
    "run.steps=2",
    "logging.console=false",
    "data.max_bad_fraction=.5",
]
RL = ["reward.functions=[{name: 'steered:Obedience'}]", "validation.num_prompts=2"]
GIVEN = ["algorithm.min_num_conditional_frames=1", "algorithm.max_num_conditional_frames=1"]
STEERED = "model.family=steered:Steered"
CASES = {
    "nft": ("cosmos25_i2v_nft", [STEERED, *RL, "rollout.trajectories=shuffle"]),
    "ddrl": ("cosmos25_ddrl", [STEERED, *RL, *GIVEN, "algorithm.kl_beta=.1"]),
    "sft": ("cosmos25_sft", [STEERED, *GIVEN, "sampling.height=32", "sampling.width=32"]),
    "sana_wm": ("sana_wm_nft", ["data.inputs=[c2w, intrinsics]", "validation.num_prompts=2"]),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Five clips with actions (the third has a wrong width). The folder `room` next to them has clips with cameras."""
    folder = write_world(tmp_path_factory.mktemp("world") / "actions")
    np.save(folder / "2.actions.npy", np.zeros((8, WIDTH + 1), np.float32))
    write_room(folder.with_name("room"))
    return folder


def settings(case, folder, tiny_pipelines, world, *overrides):
    name, of_case = CASES[case]
    overrides = [*COMMON, *of_case, *overrides]
    family = name.removesuffix("_nft") if case == "sana_wm" else name.partition("_")[0]
    world = world.with_name("room") / "clips" if case == "sana_wm" else world
    made = tiny_recipe(name, folder, tiny_pipelines(family), *overrides, data=world)
    return {**made, "folder": TESTS}


@pytest.mark.parametrize("case", ["nft", "sft", "sana_wm"])
@pytest.mark.ci_cases("sft", "sana_wm")
def test_runs_with_actions_train_alike_on_one_rank_and_on_two(
    case, one_rank, two_ranks, tiny_pipelines, world, tmp_path
):
    batch = {"one": ["engine.gradient_accumulation=4"], "two": ["engine.gradient_accumulation=2"]}
    for name, ranks in (("one", one_rank), ("two", two_ranks)):
        overrides = batch[name] if case == "sft" else []
        ranks.run(train_with_own_code, **settings(case, tmp_path / name, tiny_pipelines, world, *overrides))
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    steps = [r for r in records(tmp_path / "one") if "optim/grad_norm" in r]
    assert steps[0]["optim/grad_norm"] > 0
    assert case == "sana_wm" or steps[-1]["data/bad/bad_actions"] >= 1


@pytest.mark.parametrize(("case", "ranks"), [("sana_wm", 1), ("ddrl", 2)])
@pytest.mark.ci_cases("sana_wm-1")
def test_workers_receive_the_conditioning_inputs(case, ranks, one_rank, two_ranks, tiny_pipelines, world, tmp_path):
    group = one_rank if ranks == 1 else two_ranks
    one_by_one = ["engine.max_forward_batch=4", "validation.at_start=false"]  # a worker denoises one group at a time
    for name, mode in (("colocated", []), ("async", ["rollout.mode=async", "rollout.max_staleness=0"])):
        group.run(train_with_own_code, **settings(case, tmp_path / name, tiny_pipelines, world, *one_by_one, *mode))
    if case == "sana_wm":  # its layers get strided inputs, and torch rounds their weight gradients differently
        assert_same_runs(tmp_path / "colocated", tmp_path / "async")
        return
    assert_bitwise_equal(tmp_path / "async", tmp_path / "colocated")


class Poses(BaseHTTPRequestHandler):
    """A pose service that reports a camera turning right for every video."""

    def do_POST(self):
        frames = np.load(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = json.dumps({"c2w": camera_path(4.0, 0.05, 0.0)[: len(frames)].tolist()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words):
        pass


def test_a_run_is_rewarded_for_following_the_camera(one_rank, tiny_pipelines, world, tmp_path):
    with HTTPServer(("127.0.0.1", 0), Poses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"{{url: 'http://127.0.0.1:{server.server_port}'}}"
            following = f"{{name: camera_following, options: {url}}}, {{name: consistency, weight: 0.3}}"
            overrides = [f"reward.functions=[{following}]", "run.steps=1", "validation.at_start=false"]
            one_rank.run(train_with_own_code, **settings("sana_wm", tmp_path, tiny_pipelines, world, *overrides))
        finally:
            server.shutdown()
            thread.join()
    metrics = {tag: value for line in records(tmp_path) for tag, value in line.items()}
    assert metrics["reward/camera_following/failed"] == 0
    assert 0 < metrics["reward/camera_following/mean"] < 1
    # Each group follows another clip's path, but the service reports the same path for all.
    assert metrics["reward/camera_following/std"] > metrics["reward/camera_following/group_std_mean"] == 0


@pytest.fixture(scope="module")
def sampler(tiny_pipelines):
    model = registry.load_model(
        tiny_pipelines("cosmos25"),
        dtype=torch.float32,
        device="cpu",
        guardrail="off",
        user_family="steered:Steered",
    )
    settings = SamplingRecipe(height=32, width=32, num_frames=FRAMES, eval_steps=2, guidance_scale=3.0)
    return Sampler(model=model, text_cache=TextCache(model), settings=settings, forward=CountingForward(model.denoise))


def prompt(k, domain=0):
    inputs = {"actions": np.full((FRAMES - 1, WIDTH), k, np.float32), "domain": np.array(domain, np.float32)}
    return Prompt(id=str(k), text="a world", inputs=inputs)


def test_both_halves_of_guidance_get_the_actions_and_swapped_actions_swap_velocities(sampler):
    latents = torch.ones(2, *sampler.latent_shape)
    sigma = torch.full((2,), 0.5)
    here, there = (
        sampler.encode_conditioning([prompt(1), prompt(2)]),
        sampler.encode_conditioning([prompt(2), prompt(1)]),
    )
    assert torch.equal(here.positive["actions"], here.negative["actions"])
    one, other = (sampler.predict_velocity("sample", latents, sigma, told, 0) for told in (here, there))
    assert torch.equal(one, other.flip(0))
    assert not torch.equal(one[0], one[1])


def test_shuffled_trajectories_come_from_another_clip_of_the_domain():
    prompts = [prompt(k, domain=k % 2) for k in range(6)] + [prompt(9, domain=3)]
    orders = set()
    for step in range(20):
        told = [int(p.inputs["actions"][0, 0]) for p in shuffle_trajectories(prompts, seed=0, step=step)]
        assert told[-1] == 9  # the only prompt of its domain
        assert all(a != k and a % 2 == k % 2 for k, a in enumerate(told[:-1]))
        assert sorted(told[:-1]) == list(range(6))
        orders.add(tuple(told))
    assert len(orders) > 2


def test_an_exchanged_camera_starts_at_the_pose_of_the_clip():
    def path(start):
        poses = np.broadcast_to(np.eye(4, dtype=np.float32), (3, 4, 4)).copy()
        poses[:, :3, 3] = start
        poses[:, 0, 3] += np.arange(3) * start
        return Prompt(id="p", text="p", inputs={"c2w": poses})

    one, other = shuffle_trajectories([path(1.0), path(10.0)], seed=0, step=1)
    assert one.inputs["c2w"][:, 0, 3].tolist() == [1, 11, 21]
    assert other.inputs["c2w"][:, 0, 3].tolist() == [10, 11, 12]


@check_each(
    ("overrides", "says"),
    [
        (["model.family=null"], "data.inputs actions, domain: cosmos25 supports only text and frames"),
        (["data.inputs=[domain]", "rollout.trajectories=data"], "steered needs actions: add it to data.inputs"),
        (["data.inputs=[actions, words]"], "data.inputs words: steered supports actions, domain"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(overrides, says, tiny_pipelines, world, tmp_path):
    made = settings("nft", tmp_path, tiny_pipelines, world, *overrides)
    recipe = recipe_file.load_recipe(Path(made["recipe"]), made["overrides"])
    with pytest.raises(RecipeError, match=says):
        load_model(recipe, torch.device("cpu"))


@check_each(
    ("overrides", "says"),
    [
        (["data.inputs=[]"], "rollout.trajectories: shuffle needs actions or c2w in data.inputs"),
        (["rollout.trajectories=library"], "library and trajectory_library belong together"),
        (["data.actions.normalize=quantile"], "stats and normalize belong together"),
        (
            ["validation.prompts=p.txt", "algorithm.min_num_conditional_frames=0"],
            "samples are conditioned on data.inputs",
        ),
        (
            ["sampling.num_frames=1", "rollout.trajectories=data"],
            "data.inputs: actions needs sampling.num_frames above 1",
        ),
        (["data.kind=cosmos"], "inputs is for kind paired, folder, webdataset, lerobot or sets, not cosmos"),
    ],
)
def test_recipes_whose_trajectories_do_not_fit_are_refused(overrides, says, tiny_pipelines, world, tmp_path):
    made = settings("nft", tmp_path, tiny_pipelines, world, *overrides)
    with pytest.raises(UserError, match=says):
        recipe_file.load_recipe(Path(made["recipe"]), made["overrides"])


def text_data(metadata):
    prompts = [Prompt(id="p", text="p", metadata=metadata)]
    return TrainingData(prompts=prompts, samples=[], bad={}, held_out=[], validation_prompts=[])


def test_a_reward_that_needs_actions_is_refused_if_samples_have_none(tiny_pipelines, world, tmp_path):
    made = settings("nft", tmp_path, tiny_pipelines, world, "data.inputs=[domain]", "rollout.trajectories=data")
    recipe = recipe_file.load_recipe(Path(made["recipe"]), made["overrides"])
    with pytest.raises(RecipeError, match=r"reward steered:Obedience needs actions: add it to data\.inputs"):
        check_rewards(recipe, text_data({"actions": "p.actions.npy"}))
    camera = "reward.functions=[{name: camera_following, options: {url: 'http://127.0.0.1:1'}}]"
    recipe = recipe_file.load_recipe(Path(made["recipe"]), [*made["overrides"], camera])
    with pytest.raises(RecipeError, match="needs the input c2w, which this model does not accept"):
        check_rewards(recipe, text_data({"c2w": "p.c2w.npy"}))


@pytest.mark.long
def test_trajectories_can_come_from_a_library(one_rank, tiny_pipelines, world, tmp_path):
    np.save(tmp_path / "library.npy", np.ones((3, FRAMES - 1, WIDTH)))
    library = ["rollout.trajectories=library", f"rollout.trajectory_library={tmp_path / 'library.npy'}", "run.steps=1"]
    one_rank.run(train_with_own_code, **settings("nft", tmp_path / "out", tiny_pipelines, world, *library))
    assert json.loads((tmp_path / "out" / "result.json").read_text())["step"] == 1
    np.save(tmp_path / "library.npy", np.ones((3, FRAMES, WIDTH)))
    with pytest.raises(Exception, match=r"has trajectories of shape \[5, 2\], this recipe needs \[4, 2\]"):
        one_rank.run(train_with_own_code, **settings("nft", tmp_path / "other", tiny_pipelines, world, *library))
