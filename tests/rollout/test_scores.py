"""Media are sent to the rewards and scores are returned, with the real reward service."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wfm_ds.distributed.world import World
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.colocated import ScoringQueue
from wfm_ds.rollout.groups import Group, plan_step_samples
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient, pack_scores, unpack_scores
from wfm_ds.types import Prompt, Score


def parts_of_job(recipe, model):
    """Return the parts of a job that do not require an engine."""
    forward = CountingForward(model.denoise)
    sampler = Sampler(model=model, text_cache=TextCache(model), settings=recipe.sampling, forward=forward)
    return SimpleNamespace(recipe=recipe, model=model, sampler=sampler, world=World(0, 1, 0, torch.device("cpu"), None))


@pytest.fixture(scope="module")
def job(root, tiny_pipelines):
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml")
    model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    return parts_of_job(recipe, model)


@pytest.fixture(scope="module")
def rewards(job, tmp_path_factory):
    with RewardService(job.recipe.reward, tmp_path_factory.mktemp("service")) as service:
        client = RewardClient(service.endpoint, job.recipe.reward, run="test", client="test")
        yield client
        client.close()


def prompts(count):
    return [Prompt(id=f"p/{i}", text="a red circle") for i in range(count)]


def submit(job, rewards, latents, sample_ids):
    """Decode and submit these latents. Return the failed scores of the invalid ones."""
    queue = ScoringQueue(job, rewards)
    queue.submit(latents, sample_ids, prompts(len(sample_ids)))
    return queue.flush()


def test_latents_that_are_not_finite_are_named_failures_and_their_neighbours_are_scored(job, rewards):
    latents = torch.randn(3, *job.model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    latents[1, 0, 0, 0] = float("nan")
    broken = submit(job, rewards, latents, ["a", "b", "c"])
    scores = rewards.wait()
    assert set(scores) == {"a", "c"}
    assert all(s.value is not None for by_reward in scores.values() for s in by_reward.values())
    assert {name: score.failure for name, score in broken["b"].items()} == {
        "color": "latents are not finite",
        "jpeg_compressibility": "latents are not finite",
    }


def test_videos_are_sent_with_their_speed(root, tiny_pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root / "tests" / "reward"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(root / "tests" / "reward")
    journal = tmp_path / "journal"
    functions = f"[{{name: motion}}, {{name: 'probe_rewards:Brightness', options: {{journal: {journal}}}}}]"
    sizes = ["sampling.num_frames=5", "sampling.fps=7.5"]
    recipe = recipe_file.load_recipe(
        root / "tests" / "recipes" / "sd3_nft.yaml", [*sizes, f"reward.functions={functions}"]
    )
    model = registry.load_model(tiny_pipelines("wan21"), dtype=torch.float32, device="cpu")
    videos = parts_of_job(recipe, model)
    latents = torch.randn(2, *videos.sampler.latent_shape, generator=torch.Generator().manual_seed(0))
    with RewardService(recipe.reward, tmp_path / "service") as service:
        client = RewardClient(service.endpoint, recipe.reward, run="test", client="test")
        submit(videos, client, latents, ["a", "b"])
        scores = client.wait()
        client.close()
    media, _ = videos.sampler.decode_to_uint8(latents)
    assert media.shape == (2, 5, 32, 32, 3)
    for i, sample_id in enumerate("ab"):
        steps = np.abs(np.diff(media[i].astype(float), axis=0)).mean() / 255
        assert scores[sample_id]["motion"].value == pytest.approx(steps)
    assert {json.loads(line)["fps"] for line in journal.read_text().splitlines()} == {7.5}


def test_nothing_finite_is_nothing_to_wait_for(job, rewards):
    latents = torch.full((2, *job.model.latent_shape(32, 32)), float("inf"))
    assert set(submit(job, rewards, latents, ["a", "b"])) == {"a", "b"}
    assert rewards.wait() == {}


def test_scores_survive_the_way_between_ranks():
    scores = {
        "a": {"x": Score(sample_id="a", reward="x", value=0.5, seconds=0.1, parts={"p": 1.0})},
        "b": {"x": Score(sample_id="b", reward="x", failure="why")},
    }
    assert unpack_scores(pack_scores(scores)) == scores


def test_samples_have_unique_ids_and_seeds_even_for_repeated_prompts():
    one = Prompt(id="p/1", text="x")
    members = plan_step_samples([Group(prompt=one)] * 2, group_size=3, step=4, run_seed=0)
    assert [m.sample_id for m in members] == [f"4/{g}/p/1/{k}" for g in range(2) for k in range(3)]
    assert len({m.sample_id for m in members}) == len({m.seed for m in members}) == 6
    assert [m.group_id for m in members] == ["4/0/p/1"] * 3 + ["4/1/p/1"] * 3
    later = plan_step_samples([Group(prompt=one)] * 2, group_size=3, step=5, run_seed=0)
    assert not {m.seed for m in members} & {m.seed for m in later}
