"""If one rank receives corrupt samples, all ranks stop with the same error before the step."""

from unittest import mock

from multi_rank.resuming import tiny_recipe, train_on_rank
from ranks import attempt
from wfm_ds.errors import RunError


def train_with_damage(recipe, overrides):
    """Train, and return the error message. The samples of rank 1's second step arrive without tensors."""
    from dataclasses import replace

    import torch.distributed as dist

    from wfm_ds.transport.client import PipeClient

    fetch, calls = PipeClient.fetch_results, []

    def fetch_damaged(client, ids, timeout_s):
        calls.append(None)
        found = fetch(client, ids, timeout_s)
        spoilt = dist.get_rank() == 1 and len(calls) == 2
        return {key: replace(message, specs=(), payload=()) for key, message in found.items()} if spoilt else found

    with mock.patch.object(PipeClient, "fetch_results", fetch_damaged):
        return attempt(lambda: train_on_rank(recipe, overrides), RunError)


def test_all_ranks_end_with_the_error_of_the_rank_with_corrupt_samples(two_ranks, tiny_pipelines, tmp_path):
    overrides = ["rollout.mode=async", "run.steps=4", "logging.console=false", "validation.at_start=false"]
    recipe = tiny_recipe("sd3_nft", tmp_path / "run", tiny_pipelines("sd3"), *overrides)
    said = two_ranks.run(train_with_damage, **recipe)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 cannot get the samples of step 2: ")
