"""Ranks that share the tokens of each sample train like one process with plain torch, at every ZeRO stage."""

import functools

import pytest

from distributed.sequence_sharing import assert_same_training, train_alone, train_on_ranks


@pytest.fixture(scope="module")
def alone(tiny_pipelines):
    """What train_alone gives, computed once per setting."""
    return functools.cache(lambda family, lora: train_alone(family, tiny_pipelines(family), lora))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("config", ["zero1", "zero2", "zero3"])
def test_two_ranks_of_a_replica_train_like_one_process(two_ranks, tiny_pipelines, alone, config, lora):
    parts = two_ranks.run(
        train_on_ranks, family="sd3", folder=str(tiny_pipelines("sd3")), config=config, lora=lora, sp=2
    )
    assert_same_training(parts, alone("sd3", lora))
