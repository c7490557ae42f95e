"""Two experts in one engine on two ranks train like one process. Some micro-steps and steps leave an expert idle."""

import copy
import functools

import pytest
import torch

from multi_rank.training import TARGETS, small_recipe
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.optimizer_steps import ema_decay, learning_rate
from wfm_ds.engine.policies import add_adapters
from wfm_ds.models.tiny.sizes import WAN
from wfm_ds.models.tiny.weights import build_transformer
from wfm_ds.models.wan import Experts
from wfm_ds.seeds import derive_seed

RANKS, MICRO_STEPS = 2, 3
# The expert of each micro-step, by optimizer step. Step 1 leaves expert 1 idle; step 2 uses expert 0 only at its end.
EXPERTS_OF_STEPS = [(0, 1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1)]
OLD_DECAY = 0.25


def experts():
    networks = [build_transformer("WanTransformer3DModel", WAN, seed) for seed in (0, 5)]
    return Experts(dict(zip(("transformer", "transformer_2"), networks, strict=True)))


def recipe(config, lora, dtype="float32"):
    bound = 0.05 if lora else 0.3  # low enough to clip some steps
    return small_recipe(config, lora=lora, engine={"max_grad_norm": bound}, model={"dtype": dtype})


def build(config, lora, dtype):
    return DenoiserEngine.build(
        experts(),
        recipe(config, lora, dtype),
        World.join(),
        lora_targets=TARGETS,
        policies=frozenset({"old", "ema"}),
        accumulation=MICRO_STEPS,
        total_updates=len(EXPERTS_OF_STEPS),
    )


def predict(forward, number, expert, dtype=torch.float32):
    draw = torch.Generator().manual_seed(number)
    return forward(
        hidden_states=torch.randn(1, 4, 2, 4, 4, generator=draw).to(dtype),
        timestep=1000 * torch.rand(1, generator=draw),
        encoder_hidden_states=torch.randn(1, 5, 32, generator=draw).to(dtype),
        return_dict=False,
        expert=expert,
    )[0].float()


def loss_of(forward, number, expert, dtype=torch.float32):
    target = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(9000 + number))
    return (predict(forward, number, expert, dtype) - target).square().mean()


def term(step, micro, rank):
    return (step * MICRO_STEPS + micro) * RANKS + rank


def outputs(forward, dtype=torch.float32):
    with torch.no_grad():
        return torch.cat([predict(forward, 77, expert, dtype) for expert in (0, 1)])


def train_on_ranks(config, lora, dtype="float32", forgetful=True):
    engine = build(config, lora, dtype)
    if not forgetful:
        engine.shards.zero_gradients = lambda: None
    norms = []
    for step, trained_experts in enumerate(EXPERTS_OF_STEPS):
        for micro, expert in enumerate(trained_experts):
            loss = loss_of(engine.forward_module, term(step, micro, engine.world.rank), expert, getattr(torch, dtype))
            engine.backward(loss, RANKS * MICRO_STEPS)
        result = engine.step()
        assert result.is_applied
        norms.append(result.grad_norm)
        engine.update_ema()
        engine.update_policy("old", OLD_DECAY)
    tensors, shown = {}, {}
    for policy in ("train", "old", "ema"):
        tensors[policy] = {name: t for name, t in engine.iter_full_tensors(policy) if t is not None}
        with engine.use_policy(policy):
            shown[policy] = outputs(engine.forward_module, getattr(torch, dtype))
    return {"norms": norms, "tensors": tensors, "outputs": shown}


@functools.cache
def reference(lora):
    """Train with plain torch in one process. Return (gradient norms, weights by policy, outputs by policy)."""
    settings = recipe("zero2", lora)
    theta = experts()
    if lora:
        add_adapters(theta, settings.lora, TARGETS, [], derive_seed(settings.run.seed, "lora_init"))
    policies = {name: copy.deepcopy(theta) for name in ("old", "ema")} | {"train": theta}
    trained = [p for p in theta.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, eps=settings.optimizer.eps, weight_decay=settings.optimizer.weight_decay)
    norms = []
    for step, trained_experts in enumerate(EXPERTS_OF_STEPS):
        optimizer.zero_grad(set_to_none=False)
        pairs = [
            (term(step, micro, rank), expert) for micro, expert in enumerate(trained_experts) for rank in range(RANKS)
        ]
        (sum(loss_of(theta, number, expert) for number, expert in pairs) / len(pairs)).backward()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, settings.engine.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step + 1, len(EXPERTS_OF_STEPS))
        optimizer.step()
        for name, decay in (("ema", ema_decay(settings.ema.decay, step + 1)), ("old", OLD_DECAY)):
            with torch.no_grad():
                followers = [p for p in policies[name].parameters() if p.requires_grad]
                for follower, leader in zip(followers, trained, strict=True):
                    follower.copy_(decay * follower + (1 - decay) * leader)
    tensors = {
        policy: {n.replace(".default.", "."): p.detach() for n, p in module.named_parameters() if p.requires_grad}
        for policy, module in policies.items()
    }
    return norms, tensors, {policy: outputs(module) for policy, module in policies.items()}


@pytest.mark.parametrize(
    ("stage", "lora"),
    [
        ("zero2", True),
        ("zero3", False),
        ("zero2", False),
        ("zero3", True),
    ],
)
@pytest.mark.ci_cases("zero2-True", "zero3-True")
def test_two_ranks_train_two_experts_like_one_process(two_ranks, stage, lora):
    norms, tensors, shown = reference(lora)
    parts = two_ranks.run(train_on_ranks, config=stage, lora=lora)
    for part in parts:
        assert part["norms"] == pytest.approx(norms, rel=1e-4)
        for policy, output in part["outputs"].items():
            torch.testing.assert_close(output, shown[policy], rtol=0, atol=1e-5)
    for policy, want in tensors.items():
        got = parts[0]["tensors"][policy]
        assert got.keys() == want.keys()
        assert {name.split(".")[0] for name in got} == {"transformer", "transformer_2"}
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stage", "lora"), [("zero2", True), ("zero2", False), ("zero3", True), ("zero3", False)])
@pytest.mark.ci_cases("zero2-True")
def test_two_experts_train_in_bfloat16(two_ranks, stage, lora):
    """DeepSpeed sums bfloat16 gradients with other code. A lost or stale gradient changes the norm by at least 10 %."""
    parts = two_ranks.run(train_on_ranks, config=stage, lora=lora, dtype="bfloat16")
    assert parts[0]["norms"] == pytest.approx(reference(lora)[0], rel=2e-2)


# Unexpected behaviour of DeepSpeed. If one of these tests fails, the workaround or the error for it can be removed.


def test_zero_1_loses_gradients_of_the_expert_that_is_idle_last(two_ranks):
    """require_idle_expert_support rejects ZeRO-1, also for LoRA, which keeps gradients only without `overlap_comm`."""
    norms = two_ranks.run(train_on_ranks, config="zero1", lora=False)[0]["norms"]
    assert abs(norms[0] / reference(False)[0][0] - 1) > 0.05


def test_zero_3_keeps_gradients_of_the_previous_step(two_ranks):
    """Shards.zero_gradients, which this test disables, clears them."""
    norms = two_ranks.run(train_on_ranks, config="zero3", lora=True, forgetful=False)[0]["norms"]
    assert norms[0] == pytest.approx(reference(True)[0][0], rel=1e-4)
    assert norms[1] > 1.1 * reference(True)[0][1]
