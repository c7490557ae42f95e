"""Skipped optimizer steps, the learning-rate schedule, errors at the start, and the rank guard."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from multi_rank.training import (
    EVERYTHING,
    MICRO_STEPS,
    TARGETS,
    build,
    follow,
    full_tensors,
    plain_step,
    predict,
    small_recipe,
    small_sd3,
    train_step,
)
from ranks import attempt
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.distributed.world import COLLECTIVE_TIMEOUT_S, World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.optimizer_steps import learning_rate
from wfm_ds.engine.step_checks import RankGuard
from wfm_ds.errors import ModelError, RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout.groups import PromptGroups
from wfm_ds.training.rl import RlLoop

A_MATRIX = "transformer_blocks.0.attn.to_q.lora_A.default.weight"


def all_flats(engine):
    return [*engine.shards.master_weights(), *(flat for copy in engine.copies.values() for flat in copy.flats)]


def train_through(config, lora, dtype, spoils):
    """Train steps 0, 1, ... Each entry of `spoils` that is not None adds a step that must be skipped."""
    engine, kind = build(config, lora=lora, model={"dtype": dtype}), getattr(torch, dtype)
    rows, skipped = [], []
    for spoil in spoils:
        before = [flat.clone() for flat in all_flats(engine)]
        result, _ = train_step(engine, len(rows), kind, spoil)
        follow(engine, result)
        if spoil is None:
            rows.append([result.lr, result.grad_norm])
        else:
            unmoved = all(map(torch.equal, before, all_flats(engine)))
            skipped.append([not result.is_applied, math.isnan(result.grad_norm), not result.is_clipped, unmoved])
    tensors = {policy: full_tensors(engine, policy) for policy in ("train", "old", "ema")}
    counts = [engine.num_updates, engine.num_skipped]
    return {"rows": rows, "skipped": skipped, "tensors": tensors, "counts": counts}


@pytest.mark.parametrize(
    ("stage", "lora", "dtype"),
    [
        ("zero1", True, "float32"),
        ("zero1", False, "bfloat16"),
        ("zero2", False, "float32"),
        ("zero2", True, "bfloat16"),
        ("zero3", False, "float32"),
        ("zero3", True, "bfloat16"),
    ],
)
@pytest.mark.ci_cases("zero1-True-float32", "zero2-True-bfloat16", "zero3-True-bfloat16")
def test_nan_on_one_rank_and_a_step_without_terms_change_nothing(two_ranks, stage, lora, dtype):
    settings = {"config": stage, "lora": lora, "dtype": dtype}
    clean = two_ranks.run(train_through, **settings, spoils=[None, None])
    spoilt = two_ranks.run(train_through, **settings, spoils=["empty", None, "nan", None])
    for part, want in zip(spoilt, clean, strict=True):
        assert part["counts"] == [2, 2]
        assert want["counts"] == [2, 0]
        assert part["skipped"] == [[True] * 4] * 2
        assert part["rows"] == want["rows"]
        for policy, tensors in want["tensors"].items():
            assert all(torch.equal(part["tensors"][policy][name], tensor) for name, tensor in tensors.items())


def follow_every_third_step(skipped, resumed_after):
    """Return the number of updates and the distance of DDRL's reference from the trained weights after RL step 3."""
    recipe = Recipe.model_validate(
        {
            "run": {"output_dir": "unused", "steps": 4},
            "model": {"path": "unused"},
            "data": {"kind": "prompts", "path": "unused"},
            "sampling": {"height": 16, "width": 16, "solver": "edm_2ab"},
            "algorithm": {"name": "ddrl", "train_on": [0], "kl_beta": 0.1, "update_ref_every": 3},
            "rollout": {},
            "reward": {"functions": [{"name": "mock"}]},
        }
    )
    engine = build("zero2", lora=True, policies={"old"}, accumulation=1)
    job = SimpleNamespace(engine=engine, recipe=recipe)

    def trainer():
        source = SimpleNamespace(groups=PromptGroups(None, 1))
        stateless = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        return RlLoop(job, build_rl_algorithm(recipe, None), source, stateless, None, None)

    loop = trainer()
    for step in range(1, 4):
        loop.step = step
        if step not in skipped:
            plain_step(engine, step)
        loop.update_policy_copies()
        if step == resumed_after:
            state, loop = loop.state_dict(), trainer()
            loop.load_state_dict(state)
    return [engine.num_updates, engine.policy_distance("old")]


@pytest.mark.parametrize("resumed_after", [None, 2])
def test_a_periodic_reference_is_updated_even_if_its_step_was_skipped(two_ranks, resumed_after):
    for part in two_ranks.run(follow_every_third_step, skipped=[3], resumed_after=resumed_after):
        assert part == [2, 0.0]


def learning_rates(config):
    sections = {"lora": True, "optimizer": {"warmup_steps": 2}}
    engine, options = build(config, accumulation=1, **sections), small_recipe(config, **sections).optimizer
    used = []
    for step in range(4):
        result = plain_step(engine, step)
        used.append([result.lr, *(group["lr"] for group in engine.ds.optimizer.param_groups)])
    return {"used": used, "want": [[learning_rate(options, update, 4)] * 2 for update in range(1, 5)]}


def test_the_optimizer_uses_the_scheduled_rate(two_ranks):
    for part in two_ranks.run(learning_rates, config="zero2"):
        assert part["used"] == part["want"]
        assert [row[0] for row in part["used"]] == pytest.approx([0, 0.005, 0.01, 0.006])  # ends halfway to 0.002


def misuse():
    """Call engine methods in a wrong order and return the error messages."""
    engine = build("zero2", lora=True)
    output = predict(engine.forward_module, [0])
    early = [
        attempt(engine.step, RuntimeError),
        attempt(lambda: engine.backward(output, 1), ValueError),
        attempt(lambda: engine.backward(output.mean(), 0), ValueError),
    ]
    for _ in range(MICRO_STEPS):
        engine.backward(predict(engine.forward_module, [0]).mean(), 6)
    late = [
        attempt(lambda: engine.backward(predict(engine.forward_module, [0]).mean(), 6), RuntimeError),
        attempt(engine.skip_step, RuntimeError),
        attempt(lambda: engine.policy_distance("ref"), ValueError),
    ]
    return [*early, *late, engine.step().is_applied]


def test_calls_out_of_order_are_refused(two_ranks):
    for messages in two_ranks.run(misuse):
        assert messages == [
            "step() after 0 of 3 backward passes",
            "loss_sum must be a scalar, got shape (1, 4, 8, 8)",
            "a step with 0 terms has no gradient: call skip_step()",
            "call step() first: all 3 backward passes of the optimizer step are done",
            "skip_step() after 3 backward passes of a step",
            "ref has no tensors in a LoRA run: it is the base model without adapter",
            True,
        ]


def idle_layer(config, lora, frozen):
    """Train one step with a layer that no forward runs. Return the message and whether a weight changed."""
    module = small_sd3()
    module.idle = torch.nn.Linear(8, 8)
    recipe = small_recipe(config, lora=lora, targets=["to_q", "idle"])
    settings = {"lora_targets": TARGETS, "policies": frozenset(), "accumulation": 1, "total_updates": 1}
    names = frozenset({"idle.weight", "idle.bias"} if frozen else ())
    engine = DenoiserEngine.build(module, recipe, World.join(), **settings, frozen=names)
    before = [flat.clone() for flat in all_flats(engine)]
    engine.backward(predict(engine.forward_module, [engine.world.rank]).mean(), 1)
    said = attempt(engine.step, ModelError)
    return {"said": said, "moved": not all(map(torch.equal, before, all_flats(engine)))}


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        ("zero2", False),
        ("zero1", False),
        ("zero3", False),
        ("zero3", True),
    ],
)
def test_a_layer_without_gradient_is_named_before_the_step(two_ranks, config, lora):
    first, second = two_ranks.run(idle_layer, config=config, lora=lora, frozen=False)
    named = "idle.lora_A.weight, idle.lora_B.weight" if lora else "idle.weight, idle.bias"
    assert first["said"].startswith(f"{named}: trained parameters received no gradient")
    assert first == second
    assert not first["moved"]
    for part in two_ranks.run(idle_layer, config=config, lora=lora, frozen=True):
        assert part == {"said": "no error", "moved": True}


def start_with_targets(targets):
    return attempt(lambda: build("zero2", lora=True, targets=targets), RecipeError)


def test_targets_that_match_no_layer_are_refused(two_ranks):
    for message in two_ranks.run(start_with_targets, targets=["to_nothing", "norm_nowhere"]):
        assert message.startswith("lora.target_modules: to_nothing, norm_nowhere cannot be adapted: ")


def adapters_at_start(targets):
    """Build an engine with a different global random state on each rank, and return facts about its adapters."""
    module, world = small_sd3(), World.join()
    torch.manual_seed(100 + world.rank)
    state = torch.get_rng_state()
    recipe = small_recipe("zero2", lora=True, targets=targets)
    settings = {"lora_targets": TARGETS, "policies": EVERYTHING, "accumulation": 1, "total_updates": 1}
    engine = DenoiserEngine.build(module, recipe, world, **settings)
    untouched = torch.equal(torch.get_rng_state(), state)
    tensors = {policy: full_tensors(engine, policy) for policy in ("train", "old", "ema")}
    outputs = []
    for policy in ("train", "old", "ema", "ref"):
        with engine.use_policy(policy), torch.no_grad():
            outputs.append(predict(engine.forward_module, [0]))
    config = engine.lora_config()
    return {
        "untouched": untouched,
        "same": [torch.equal(tensors[p][n], t) for n, t in tensors["train"].items() for p in ("old", "ema")],
        "names": sorted(tensors["train"]),
        "first": dict(engine.module.named_parameters())[A_MATRIX].detach(),
        "equal_outputs": [torch.equal(outputs[0], other) for other in outputs],
        "config": [config.r, config.lora_alpha, sorted(config.target_modules)],
        "patch_size": engine.forward_module.config.patch_size,
    }


def test_all_policies_start_equal_and_the_recipe_may_name_targets(two_ranks):
    first, second = two_ranks.run(adapters_at_start, targets=None)
    assert first["untouched"]
    assert second["untouched"]
    assert torch.equal(first["first"], second["first"])
    assert float(first["first"].std()) == pytest.approx(0.25, rel=0.2)  # Gaussian with std 1 / rank
    assert all(first["same"])
    assert all(first["equal_outputs"] + second["equal_outputs"])
    assert first["config"] == [4, 8.0, sorted(TARGETS)]
    assert first["patch_size"] == 2, "the forward module shows the diffusers config, not DeepSpeed's"
    chosen, _ = two_ranks.run(adapters_at_start, targets=["to_q"])
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in chosen["names"]} == {"to_q"}


def linear_after_zero3():
    build("zero3", lora=False, policies=())
    return torch.nn.functional.linear is torch._C._nn.linear


def test_zero3_leaves_torch_linear_alone(two_ranks):
    assert two_ranks.run(linear_after_zero3) == [True, True]


def guarded(disagree, extra, timeout_s=COLLECTIVE_TIMEOUT_S):
    """Return the guard's error message on this rank, or "no error"."""
    world = dataclasses.replace(World.join(), timeout_s=timeout_s)
    guard = RankGuard(world)

    def compare():
        guard.compare_ranks("old", False, (4, 8, 8))
        guard.compare_ranks("ref" if disagree and world.rank else "old", False, (4, 8, 8))
        if extra and world.rank:
            guard.compare_ranks("old", False, (4, 8, 8))

    return attempt(compare, RuntimeError)


def test_the_guard_names_the_next_forward_of_each_rank(two_ranks):
    assert two_ranks.run(guarded, disagree=False, extra=False) == ["no error"] * 2
    messages = two_ranks.run(guarded, disagree=True, extra=False)
    assert messages[0] == messages[1]
    assert messages[0].startswith("ranks disagree at forward pass 2: ")
    assert "'old', False" in messages[0]
    assert "'ref', False" in messages[0]


def test_the_guard_reports_an_additional_forward(two_ranks):
    calm, lonely = two_ranks.run(guarded, disagree=False, extra=True, timeout_s=3)
    assert calm == "no error"
    assert lonely.startswith(
        "rank 1 waits at forward pass 3 ('old', False, (4, 8, 8)), but another rank did not reach it within 3 s:"
    )


def guard_of_engine(on):
    engine = build("zero2", lora=True, policies=(), engine={"guard": on})
    return attempt(lambda: engine.check_ranks_agree("old", engine.world.rank), RuntimeError)


def test_the_recipe_switches_the_guard_on(two_ranks):
    assert two_ranks.run(guard_of_engine, on=False) == ["no error"] * 2
    assert all("disagree" in message for message in two_ranks.run(guard_of_engine, on=True))
