"""Two ranks with DeepSpeed get the losses, norms, weights and policy outputs of plain torch in one process."""

import functools

import pytest
import torch

from each_case import check_each
from multi_rank.training import (
    EVERYTHING,
    Reference,
    build,
    follow,
    full_tensors,
    predict,
    small_recipe,
    train_step,
    write_zero3,
)
from wfm_ds.engine.optimizer_steps import learning_rate

STEPS = 4


def train_on_ranks(config, lora, dtype="float32", checkpointing=False):
    engine = build(config, lora=lora, model={"dtype": dtype, "gradient_checkpointing": checkpointing})
    kind, rows = getattr(torch, dtype), []
    for step in range(STEPS):
        result, loss = train_step(engine, step, kind)
        follow(engine, result)
        rows.append([loss, result.grad_norm, float(result.is_clipped), result.lr, float(result.is_applied)])
    outputs = {}
    for policy in ("train", *sorted(EVERYTHING)):
        with engine.use_policy(policy), torch.no_grad():
            outputs[policy] = predict(engine.forward_module, range(4), kind)
    tensors = {policy: full_tensors(engine, policy) for policy in ("train", "old", "ema")}
    distances = {policy: engine.policy_distance(policy) for policy in ("old", "ema")}
    return {"rows": rows, "outputs": outputs, "tensors": tensors, "distances": distances}


@functools.cache
def reference(lora):
    """Train the single-process reference. Return (loss, norm, clipped, lr, applied) of each step, and the reference."""
    recipe = small_recipe("zero2", lora=lora)
    lr, bound = [learning_rate(recipe.optimizer, j, STEPS) for j in range(1, 5)], recipe.engine.max_grad_norm
    alone, rows = Reference(lora=lora, lr=lr, max_grad_norm=bound), []
    for step in range(STEPS):
        loss, norm = alone.train_step(step)
        rows.append([loss, norm, float(norm > bound), lr[step], 1.0])
    return rows, alone


@pytest.fixture(scope="module")
def trained(two_ranks):
    """Return a cached train_on_ranks."""
    return functools.cache(lambda config, lora: two_ranks.run(train_on_ranks, config=config, lora=lora))


def assert_equal_to_one_process(parts, lora):
    rows, alone = reference(lora)
    assert {row[2] for row in rows} == {0.0, 1.0}, "the bound must clip some steps and spare others"
    for part in parts:
        got, want = torch.tensor(part["rows"]), torch.tensor(rows)
        torch.testing.assert_close(got[:, 0], want[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(got[:, 1:], want[:, 1:], rtol=1e-4, atol=0)
        for policy, output in part["outputs"].items():
            torch.testing.assert_close(output, alone.output(policy), rtol=0, atol=1e-5)
    for policy, tensors in parts[0]["tensors"].items():
        want = alone.tensors(policy)
        assert want.keys() <= tensors.keys()
        for name in want:
            torch.testing.assert_close(tensors[name], want[name], rtol=0, atol=1e-5)
    moved = max(float((tensor - alone.tensors("ref")[name]).abs().max()) for name, tensor in want.items())
    assert moved > 1e-2, "the weights must move much more than the tolerance"


@check_each("lora", [True, False])
@check_each("stage", ["zero1", "zero2", "zero3"])
def test_two_ranks_train_like_one_process(trained, stage, lora):
    assert_equal_to_one_process(trained(stage, lora), lora)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.ci_cases("lora")
def test_persistent_parameters_train_like_one_process(two_ranks, tmp_path, lora):
    config = write_zero3(tmp_path, stage3_param_persistence_threshold=100_000)
    assert_equal_to_one_process(two_ranks.run(train_on_ranks, config=config, lora=lora), lora)


def test_offloaded_optimizer_trains_like_one_process(two_ranks):
    assert_equal_to_one_process(two_ranks.run(train_on_ranks, config="zero3_offload", lora=False), False)


@pytest.mark.parametrize("checkpointing", [True, "attention"])
@pytest.mark.parametrize(("stage", "lora"), [("zero1", False), ("zero2", True), ("zero3", False), ("zero3", True)])
@pytest.mark.ci_cases("zero1-False-True", "zero2-True-True")
def test_gradient_checkpointing_changes_nothing(two_ranks, stage, lora, checkpointing):
    parts = two_ranks.run(train_on_ranks, config=stage, lora=lora, checkpointing=checkpointing)
    assert_equal_to_one_process(parts, lora)


@pytest.mark.parametrize(("stage", "lora"), [("zero1", False), ("zero2", True), ("zero3", False)])
@pytest.mark.ci_cases("zero1-False", "zero2-True")
def test_bfloat16_stays_near_float32(two_ranks, stage, lora):
    part = two_ranks.run(train_on_ranks, config=stage, lora=lora, dtype="bfloat16")[0]
    losses, wants = (torch.tensor([row[0] for row in rows]) for rows in (part["rows"], reference(lora)[0]))
    torch.testing.assert_close(losses, wants, rtol=0, atol=5e-3)
    assert all(tensor.dtype == torch.float32 for tensor in part["tensors"]["train"].values())
    masters = torch.cat([t.flatten() for n, t in part["tensors"]["train"].items() if "pos_embed.pos_embed" not in n])
    assert not torch.equal(masters, masters.bfloat16().float()), "these are rounded weights, not the masters"


def test_the_distance_of_shards_equals_that_of_the_gathered_tensors(trained):
    for stage in ("zero2", "zero3"):
        parts = trained(stage, True)
        for policy, distance in parts[0]["distances"].items():
            pairs = [(parts[0]["tensors"]["train"][n], other) for n, other in parts[0]["tensors"][policy].items()]
            difference = sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5
            norm = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
            assert distance == pytest.approx(difference / norm, rel=1e-9)
            assert parts[1]["distances"][policy] == distance


def two_forwards_on_ranks(config):
    """Compute one loss from two forwards. A third forward, under no_grad, runs before the backward pass."""
    engine = build(config, lora=True, accumulation=1)
    rank = engine.world.rank
    first = predict(engine.forward_module, [rank])
    second = predict(engine.forward_module, [2 + rank])
    with torch.no_grad():
        idle = predict(engine.forward_module, [4 + rank])
    engine.backward((first * second * idle).square().mean(), 2)
    return engine.step().grad_norm


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_loss_may_depend_on_several_forwards(two_ranks, stage):
    alone = Reference(lora=True, lr=[0.0], max_grad_norm=1e9)
    loss = 0.0
    for rank in range(2):
        first, second = predict(alone.theta, [rank]), predict(alone.theta, [2 + rank])
        loss = loss + (first * second * predict(alone.theta, [4 + rank]).detach()).square().mean() / 2
    loss.backward()
    want = float(torch.stack([p.grad.square().sum() for p in alone.trained]).sum().sqrt())
    assert two_ranks.run(two_forwards_on_ranks, config=stage) == pytest.approx([want, want], rel=1e-5)
