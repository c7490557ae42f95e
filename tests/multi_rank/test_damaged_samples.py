"""If one rank receives corrupt samples, all ranks stop with the same error before the step."""

from pathlib import Path

from multi_rank.resuming import train_on_rank

ROOT = Path(__file__).parent.parent.parent


def train_with_damage(recipe, overrides):
    """Train, and return the error message. The samples of rank 1's second step arrive without tensors."""
    from dataclasses import replace

    import torch.distributed as dist

    from wfm_ds.errors import RunError
    from wfm_ds.transport.client import PipeClient

    fetch, calls = PipeClient.fetch_results, []

    def fetch_damaged(client, ids, timeout_s):
        calls.append(None)
        found = fetch(client, ids, timeout_s)
        spoilt = dist.get_rank() == 1 and len(calls) == 2
        return {key: replace(message, specs=(), payload=()) for key, message in found.items()} if spoilt else found

    PipeClient.fetch_results = fetch_damaged
    try:
        train_on_rank(recipe, overrides)
    except RunError as error:
        return str(error)
    finally:
        PipeClient.fetch_results = fetch
    return "it went on"


def test_all_ranks_end_with_the_error_of_the_rank_with_corrupt_samples(two_ranks, tiny_pipelines, tmp_path):
    said = two_ranks.run(
        train_with_damage,
        recipe=str(ROOT / "tests" / "recipes" / "sd3_nft.yaml"),
        overrides=[
            f"run.output_dir={tmp_path / 'run'}",
            f"model.path={tiny_pipelines('sd3')}",
            f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}",
            *["rollout.mode=async", "run.steps=4", "logging.console=false", "validation.at_start=false"],
        ],
    )
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 cannot get the samples of step 2: ")
