"""Sequence parallelism trains like plain torch in one process, at every ZeRO stage."""

import functools

import pytest

from multi_rank.sequence_sharing import assert_same_training, train_alone, train_on_ranks

LORA = pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])


@pytest.fixture(scope="module")
def alone(tiny_pipelines):
    """Return a cached train_alone."""
    return functools.cache(lambda family, lora: train_alone(family, tiny_pipelines(family), lora))


@pytest.fixture
def assert_alike(alone, tiny_pipelines):
    """Return a function that trains on the given ranks and compares with one process."""

    def check(ranks, family, lora, **setting):
        folder = str(tiny_pipelines(family))
        parts = ranks.run(train_on_ranks, family=family, folder=folder, lora=lora, **setting)
        assert_same_training(parts, alone(family, lora))

    return check


@LORA
@pytest.mark.parametrize("config", ["zero1", "zero2", "zero3"])
def test_a_replica_of_two_ranks_trains_like_one_process(two_ranks, assert_alike, config, lora):
    assert_alike(two_ranks, "sd3", lora, config=config, sp=2)


@pytest.mark.parametrize("checkpointing", [True, "attention"])
@pytest.mark.parametrize(("config", "lora"), [("zero2", True), ("zero3", False)])
def test_gradient_checkpointing_repeats_exchanges_and_changes_nothing(
    two_ranks, assert_alike, config, lora, checkpointing
):
    assert_alike(two_ranks, "sd3", lora, config=config, sp=2, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("sp", "config", "lora"),
    [
        (1, "zero1", True),
        (1, "zero2", False),
        (1, "zero3", True),
        (2, "zero1", False),
        (2, "zero2", True),
        (2, "zero3", False),
    ],
)
def test_four_ranks_in_any_shape_train_like_one_process(four_ranks, assert_alike, sp, config, lora):
    assert_alike(four_ranks, "sd3", lora, config=config, sp=sp)


@pytest.mark.parametrize("family", ["sana_video", "wan21", "cosmos3"])
def test_families_train_adapters_like_one_process(two_ranks, assert_alike, family):
    assert_alike(two_ranks, family, True, config="zero2", sp=2, checkpointing="attention")


@pytest.mark.parametrize("family", ["sana", "wan22_ti2v", "cosmos25"])
def test_families_train_all_weights_like_one_process(two_ranks, assert_alike, family):
    assert_alike(two_ranks, family, False, config="zero3", sp=2, checkpointing=True)


@pytest.mark.parametrize(("config", "lora"), [("zero2", False), ("zero3", True)])
def test_two_experts_train_like_one_process(two_ranks, assert_alike, config, lora):
    assert_alike(two_ranks, "wan22", lora, config=config, sp=2)
