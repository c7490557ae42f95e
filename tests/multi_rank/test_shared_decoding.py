"""The ranks of a replica split the decoding. The leader gets the same pixels as if it decoded all samples itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wfm_ds.distributed.world import World
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.colocated import ScoringQueue
from wfm_ds.rollout.rewards import decode_in_replica
from wfm_ds.types import Prompt


class Sent:
    """A reward client that stores the submitted batches."""

    names, sound_rewards = ("color",), ()

    def __init__(self):
        self.batches = []

    def submit(self, batch, failures=()):
        self.batches.append((list(batch.sample_ids), torch.from_numpy(batch.media.copy())))


def job_of(recipe, folder):
    model = registry.load_model(folder, dtype=torch.float32, device="cpu")
    recipe = recipe_file.load_recipe(Path(recipe))
    sampler = Sampler(
        model=model, text_cache=TextCache(model), settings=recipe.sampling, forward=CountingForward(model.denoise)
    )
    return SimpleNamespace(recipe=recipe, model=model, sampler=sampler, world=World.join().with_replicas(2))


def drawn(job, count):
    latents = torch.randn(count, *job.sampler.latent_shape, generator=torch.Generator().manual_seed(0))
    latents[1 % count, 0, 0, 0] = float("nan")
    return latents


def decode_together(recipe, folder, count):
    """Return the pixels, finite flags, number of samples decoded here, and the pixels decoded by one rank alone."""
    job, here = job_of(recipe, folder), []
    latents = drawn(job, count)
    with job.model.pipeline.vae.decoder.register_forward_hook(lambda *_: here.append(1)):
        media, finite = decode_in_replica(job, latents)
    return torch.from_numpy(media), finite, len(here), torch.from_numpy(job.sampler.decode_to_uint8(latents)[0])


def submit_chunks(recipe, folder, sizes):
    """Return the submitted batches, their number after each chunk, the non-finite samples, and all pixels."""
    job, sent, after = job_of(recipe, folder), Sent(), []
    latents, submissions, first = drawn(job, sum(sizes)), ScoringQueue(job, sent), 0
    for size in sizes:
        chosen = range(first, first + size)
        prompts = [Prompt(id=f"p/{i}", text="a red circle") for i in chosen]
        submissions.submit(latents[first : first + size], [f"s{i}" for i in chosen], prompts)
        first += size
        after.append(len(sent.batches))
    return sent.batches, after, sorted(submissions.flush()), torch.from_numpy(job.sampler.decode_to_uint8(latents)[0])


@pytest.fixture
def recipe(root):
    return str(root / "tests" / "recipes" / "sd3_nft.yaml")


@pytest.mark.parametrize(("count", "shares"), [(3, [2, 1]), (1, [1, 0]), (4, [2, 2])])
def test_each_rank_decodes_a_part_and_the_leader_gets_all_pixels(two_ranks, tiny_pipelines, recipe, count, shares):
    leader, other = two_ranks.run(decode_together, recipe=recipe, folder=str(tiny_pipelines("sd3")), count=count)
    assert torch.equal(leader[0], leader[3])
    assert len(leader[0]) == count
    assert len(other[0]) == 0
    assert leader[1] == other[1] == [i != 1 % count for i in range(count)]
    assert [leader[2], other[2]] == shares


def test_small_chunks_wait_until_every_rank_has_a_sample(two_ranks, tiny_pipelines, recipe):
    folder = str(tiny_pipelines("sd3"))
    (sent, after, broken, alone), (nothing, *_, broken_there, _) = two_ranks.run(
        submit_chunks, recipe=recipe, folder=folder, sizes=[1, 1, 1, 2, 1]
    )
    assert [ids for ids, _ in sent] == [["s0"], ["s2", "s3", "s4"], ["s5"]]  # s1 is not finite
    assert after == [0, 1, 1, 2, 2]
    assert torch.equal(torch.cat([media for _, media in sent]), alone[[0, 2, 3, 4, 5]])
    assert nothing == []
    assert broken == broken_there == ["s1"]
