"""Two adapters that train in turn in one engine, compared with two AdamW optimizers of plain torch in one process."""

import functools
from pathlib import Path

import peft
import pytest
import torch

from each_case import check_each
from multi_rank.training import TARGETS, full_tensors, predict, small_recipe, small_sd3, target, write_zero3
from ranks import attempt
from wfm_ds.checkpoint.checkpoint_weights import CheckpointWeights
from wfm_ds.checkpoint.sharded_states import ShardedStates, capture_state, restore_state
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.optimizer import ExtraAdapter
from wfm_ds.engine.optimizer_steps import ema_decay, learning_rate
from wfm_ds.engine.policies import add_adapters
from wfm_ds.errors import ModelError, UserError
from wfm_ds.export.target import ExportTarget
from wfm_ds.seeds import derive_seed

FAKE = ExtraAdapter(lr=3e-2, betas=(0.0, 0.99))
PLAN = ("fake", "fake", "default", "fake", "default", "fake")  # the adapter of each optimizer step
MICRO_STEPS = {"default": 2, "fake": 1}
TERMS = 2  # loss terms of a micro-step on all ranks
MAX_GRAD_NORM = 0.068  # clips the first step of default and all steps of fake
LOSS_SCALES = {"default": 1.09, "fake": 1.0}
POLICIES = ("train", "fake", "teacher", "ref", "ema")


def recipe(config, dtype="float32"):
    return small_recipe(config, lora=True, engine={"max_grad_norm": MAX_GRAD_NORM}, model={"dtype": dtype})


def teacher_tensors():
    module = small_sd3()
    add_adapters(module, recipe("zero2").lora, TARGETS, [], seed=9)
    draw = torch.Generator().manual_seed(9)
    named = [(name, p) for name, p in module.named_parameters() if ".default." in name]
    return {name.replace(".default.", "."): 0.2 * torch.randn(p.shape, generator=draw) for name, p in named}


def build(config, sp=1, dtype="float32", policies=("ref", "ema"), extra=True):
    adapters = {"extra_adapters": {"fake": FAKE}, "frozen_adapters": {"teacher": teacher_tensors()}}
    return DenoiserEngine.build(
        small_sd3(),
        recipe(config, dtype),
        World.join().with_replicas(sp),
        lora_targets=TARGETS,
        policies=frozenset(policies),
        accumulation=2,
        total_updates=2,
        **(adapters if extra else {}),
    )


def term_numbers(step, micro, dp_rank, dp_size):
    share, first = TERMS // dp_size, (2 * step + micro) * TERMS
    return range(first + dp_rank * share, first + (dp_rank + 1) * share)


def compute_guide(adapter, predict_policy):
    """Return a part of the target that depends on other policies."""
    if adapter == "default":
        return predict_policy("teacher") - predict_policy("fake")
    return predict_policy("train") + predict_policy("ema")


def sum_losses(adapter, numbers, v, guide):
    targets = torch.stack([target(number)[0] for number in numbers])
    return LOSS_SCALES[adapter] * (v - targets - 0.1 * guide).square().mean((1, 2, 3)).sum()


def run_backwards(engine, step, adapter, dtype=torch.float32):
    """Run all backward passes of an optimizer step inside `train_adapter`."""
    world, forward, micros = engine.world, engine.forward_module, MICRO_STEPS[adapter]

    def predict_policy(policy):
        with engine.use_policy(policy), torch.no_grad():
            return predict(forward, numbers, dtype)

    engine.expect_backwards(micros)
    for micro in range(micros):
        numbers = term_numbers(step, micro, world.dp_rank, world.dp_size)
        guide = compute_guide(adapter, predict_policy)
        engine.backward(sum_losses(adapter, numbers, predict(forward, numbers, dtype), guide), micros * TERMS)


def idle_states(engine, adapter):
    """Return a copy of all states that a step of `adapter` must not change."""
    other = "adapter.fake." if adapter == "default" else ""
    states = {n: flats for n, flats in engine.shard_states().items() if n.startswith("adapter.") == bool(other)}
    return {(n, group): flat.clone() for n, flats in states.items() for group, flat in enumerate(flats)}


def train(engine, first=0, last=None, dtype=torch.float32):
    """Train the optimizer steps of PLAN from `first` to `last`. Return a row of results per step."""
    rows = []
    for step, adapter in list(enumerate(PLAN))[first:last]:
        with engine.train_adapter(adapter):
            run_backwards(engine, step, adapter, dtype)
            idle = idle_states(engine, adapter)
            result = engine.step()
            engine.update_ema()
        after = idle_states(engine, adapter)
        is_idle = idle.keys() == after.keys() and all(torch.equal(flat, after[name]) for name, flat in idle.items())
        rows.append([result.grad_norm, result.lr, float(result.is_clipped), float(is_idle)])
    return rows


def fake_tensors(engine):
    """Return {name: tensor} of the adapter `fake` on rank 0."""
    shards, gathered = engine.extra_shards["fake"], {}
    for name, parameter in engine.module.named_parameters():
        if parameter in shards.slices:
            gathered[name.replace(".fake.", ".")] = shards.gather_parameter(
                parameter, shards.master_weights(), engine.world.device
            )
    return {name: tensor for name, tensor in gathered.items() if tensor is not None}


def outputs(engine, dtype=torch.float32):
    shown = {}
    for policy in POLICIES:
        with engine.use_policy(policy), torch.no_grad():
            shown[policy] = predict(engine.forward_module, range(4), dtype)
    return shown


def train_on_ranks(config, sp=1, dtype="float32"):
    engine, kind = build(config, sp, dtype), getattr(torch, dtype)
    rows = train(engine, dtype=kind)
    return {
        "rows": rows,
        "updates": [engine.num_updates, engine.adapter_updates["fake"]],
        "tensors": {"train": full_tensors(engine, "train"), "fake": fake_tensors(engine)},
        "average": full_tensors(engine, "ema"),
        "outputs": outputs(engine, kind),
        "group_counts": [len(engine.shards.lengths()), len(engine.extra_shards["fake"].lengths())],
    }


@functools.cache
def reference():
    """Train with plain torch. Return (norm, learning rate) of each step, {policy: tensors}, {policy: output}."""
    module, options = small_sd3(), recipe("zero2").optimizer
    module.requires_grad_(False)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights="gaussian")
    for name in ("default", "fake", "ema", "teacher"):
        torch.manual_seed(derive_seed(3, "lora_init"))
        module.add_adapter(config, adapter_name=name)

    def tensors(adapter):
        named = [(name, p) for name, p in module.named_parameters() if f".{adapter}." in name]
        return {name.replace(f".{adapter}.", "."): p for name, p in named}

    for name, value in teacher_tensors().items():
        tensors("teacher")[name].data.copy_(value)

    def activate(policy):
        if policy == "ref":
            module.disable_adapters()
        else:
            module.enable_adapters()
            module.set_adapter("default" if policy == "train" else policy)

    @torch.no_grad()
    def predict_policy(policy, numbers):
        activate(policy)
        return predict(module, numbers)

    shared = {"eps": options.eps, "weight_decay": options.weight_decay}
    optimizers = {
        "default": torch.optim.AdamW(tensors("default").values(), **shared),
        "fake": torch.optim.AdamW(tensors("fake").values(), betas=FAKE.betas, **shared),
    }
    rates = {"default": [learning_rate(options, update, 2) for update in (1, 2)], "fake": [FAKE.lr] * len(PLAN)}
    updates, rows = {"default": 0, "fake": 0}, []
    for step, adapter in enumerate(PLAN):
        optimizer, micros = optimizers[adapter], MICRO_STEPS[adapter]
        optimizer.zero_grad(set_to_none=True)
        for micro in range(micros):
            numbers = term_numbers(step, micro, 0, 1)
            guide = compute_guide(adapter, functools.partial(predict_policy, numbers=numbers))
            activate(adapter)
            (sum_losses(adapter, numbers, predict(module, numbers), guide) / micros / TERMS).backward()
        norm = torch.nn.utils.clip_grad_norm_(tensors(adapter).values(), MAX_GRAD_NORM)
        optimizer.param_groups[0]["lr"] = rates[adapter][updates[adapter]]
        optimizer.step()
        rows.append([float(norm), rates[adapter][updates[adapter]], float(norm > MAX_GRAD_NORM)])
        updates[adapter] += 1
        if adapter == "default":
            average, decay = tensors("ema"), ema_decay(0.3, updates["default"])
            for name, tensor in tensors("default").items():
                average[name].data.lerp_(tensor.data, 1 - decay)
    weights = {"train": tensors("default"), "fake": tensors("fake"), "ema": tensors("ema")}
    weights = {policy: {name: p.detach() for name, p in named.items()} for policy, named in weights.items()}
    return rows, weights, {policy: predict_policy(policy, range(4)) for policy in POLICIES}


def assert_equal_to_two_optimizers(parts):
    rows, weights, shown = reference()
    clipped = {(adapter, row[2]) for adapter, row in zip(PLAN, rows, strict=True)}
    assert clipped == {("default", 0.0), ("default", 1.0), ("fake", 1.0)}
    for part in parts:
        assert part["updates"] == [PLAN.count("default"), PLAN.count("fake")]
        assert all(row[3] for row in part["rows"]), "a step changed the weights, moments or step of the other adapter"
        torch.testing.assert_close(
            torch.tensor([row[:3] for row in part["rows"]]), torch.tensor(rows), rtol=1e-4, atol=0
        )
        for policy, output in part["outputs"].items():
            torch.testing.assert_close(output, shown[policy], rtol=0, atol=1e-5)
    for policy, want in weights.items():
        got = parts[0]["average"] if policy == "ema" else parts[0]["tensors"][policy]
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5)
    moved = [float((weights["train"][name] - weights["fake"][name]).abs().max()) for name in weights["train"]]
    assert max(moved) > 1e-2, "the adapters must differ much more than the tolerance"


@check_each("stage", ["zero2", "zero3"])
def test_adapters_train_in_turn_like_two_optimizers(two_ranks, stage):
    assert_equal_to_two_optimizers(two_ranks.run(train_on_ranks, config=stage))


@check_each(("stage", "sp"), [("zero1", 1), ("zero1", 2), ("zero2", 2), ("zero3", 2)])
@pytest.mark.long
def test_adapters_train_like_two_optimizers_with_other_parallelism(two_ranks, stage, sp):
    assert_equal_to_two_optimizers(two_ranks.run(train_on_ranks, config=stage, sp=sp))


@check_each("stage", ["zero1", "zero2", "zero3"])
def test_adapters_train_like_two_optimizers_on_one_rank(one_rank, stage):
    assert_equal_to_two_optimizers(one_rank.run(train_on_ranks, config=stage))


@pytest.mark.long
def test_adapters_train_like_two_optimizers_if_zero3_splits_their_groups(two_ranks, tmp_path):
    parts = two_ranks.run(train_on_ranks, config=write_zero3(tmp_path, sub_group_size=300))
    assert min(parts[0]["group_counts"]) > 1
    assert_equal_to_two_optimizers(parts)


@check_each("stage", ["zero1", "zero2", "zero3"])
@pytest.mark.long
def test_a_bfloat16_step_leaves_the_other_adapter_unchanged(two_ranks, stage):
    _, weights, _ = reference()
    parts = two_ranks.run(train_on_ranks, config=stage, dtype="bfloat16")
    assert all(row[3] for part in parts for row in part["rows"])
    for policy, tensors in parts[0]["tensors"].items():
        # Adam normalizes gradients, so rounding can change the sign of an update.
        close = [(tensors[name] - want).abs() < 5e-3 for name, want in weights[policy].items()]
        assert torch.cat([values.flatten() for values in close]).float().mean() > 0.9


def clone_states(engine):
    return {f"{n} {g}": flat.clone() for n, flats in engine.shard_states().items() for g, flat in enumerate(flats)}


def save(engine, folder, base="unused"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target_info = ExportTarget(Path(base), ("transformer",))
    capture_state(engine, {"step": 1}, target_info, torch.float32).write_files(folder)
    engine.world.barrier()


def stop_and_resume(folder, config, stops):
    """Train once, and resume after each step in `stops`. Return for each stop what is equal bit for bit."""
    engine, rows, saved_names = build(config), [], {}
    for stop in stops:
        rows += train(engine, first=len(rows), last=stop)
        save(engine, f"{folder}/{stop}")
        saved_names[stop] = clone_states(engine).keys()
    rows += train(engine, first=len(rows))
    want, shown, same = clone_states(engine), outputs(engine), []
    for stop in stops:
        resumed = build(config)
        restore_state(resumed, Path(f"{folder}/{stop}"), engine.world.size)
        has_same_names = clone_states(resumed).keys() == saved_names[stop]
        has_same_rows = train(resumed, first=stop) == rows[stop:]
        got = clone_states(resumed)
        has_same_states = want.keys() == got.keys() and all(torch.equal(got[name], flat) for name, flat in want.items())
        has_same_outputs = all(map(torch.equal, shown.values(), outputs(resumed).values()))
        has_same_counters = engine.step_counters() == resumed.step_counters()
        same.append([has_same_names, has_same_rows, has_same_states, has_same_outputs, has_same_counters])
    return same


def test_a_resumed_run_is_equal_before_the_first_update_of_default(two_ranks, tmp_path):
    for same in two_ranks.run(stop_and_resume, folder=str(tmp_path), config="zero2", stops=[1]):
        assert same == [[True] * 5]


@check_each(("stage", "stops"), [("zero1", [2]), ("zero2", [0, 2, 3, 4, 5]), ("zero3", [1, 3])])
@pytest.mark.long
def test_a_resumed_run_is_equal_after_each_step(two_ranks, tmp_path, stage, stops):
    for same in two_ranks.run(stop_and_resume, folder=str(tmp_path), config=stage, stops=stops):
        assert same == [[True] * 5] * len(stops)


def gather_states(engine):
    """Return {(state, parameter): tensor} on rank 0, and {state: number}."""
    gathered, prefix = {}, "adapter.fake."
    for state, flats in sorted(engine.shard_states().items()):
        shards = engine.extra_shards["fake"] if state.startswith(prefix) else engine.shards
        if not flats[0].ndim:
            gathered[state] = flats[0].clone()
            continue
        for name, parameter in engine.module.named_parameters():
            if parameter in shards.slices:
                gathered[f"{state} {name}"] = shards.gather_parameter(parameter, flats, engine.world.device)
    return {name: tensor for name, tensor in gathered.items() if tensor is not None}


def train_and_save(folder, config, stop):
    engine = build(config)
    train(engine, last=stop)
    save(engine, folder)
    saved = gather_states(engine)
    train(engine, first=stop)
    return saved, gather_states(engine)


def resume_elsewhere(folder, config, stop, num_ranks):
    engine = build(config)
    restore_state(engine, Path(folder), num_ranks)
    restored = gather_states(engine)
    train(engine, first=stop)
    return restored, gather_states(engine)


@pytest.mark.long
@check_each(("stop", "here", "there"), [(1, "zero2", "zero3"), (3, "zero3", "zero1")])
def test_one_rank_resumes_a_run_of_two_ranks_and_back(one_rank, two_ranks, tmp_path, stop, here, there):
    ranks = {1: one_rank, 2: two_ranks}
    for before, after in ((2, 1), (1, 2)):
        folder = str(tmp_path / f"from_{before}")
        saved, finished = ranks[before].run(train_and_save, folder=folder, config=here, stop=stop)[0]
        settings = {"folder": folder, "config": there, "stop": stop, "num_ranks": before}
        restored, resumed = ranks[after].run(resume_elsewhere, **settings)[0]
        assert restored.keys() == saved.keys()
        assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
        assert resumed.keys() == finished.keys()
        for name, tensor in finished.items():
            torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-5)


def export_and_restore(folder, pipeline):
    """Return facts about the exports of an engine and of its checkpoint, and errors of engines with other adapters."""
    engine = build("zero2")
    train(engine, last=3)
    save(engine, folder, pipeline)
    trained = full_tensors(engine, "train")
    facts = {"names": sorted(trained), "fake": fake_tensors(engine), "train": trained, "errors": []}
    if engine.world.is_main:
        with ShardedStates(Path(folder), engine.world.size) as states:
            settings = states.read_metadata(0).export.lora
            source = CheckpointWeights(states, ExportTarget(Path(pipeline), ("transformer",)), settings)
            facts["policies"] = source.policy_names()
            facts["converted"] = dict(source.iter_full_tensors("train"))
    for extra in (False, True):
        other, place = build("zero2", extra=extra), folder if not extra else f"{folder}/plain"
        if extra:
            save(build("zero2", extra=False), place)
        message = attempt(functools.partial(restore_state, other, Path(place), engine.world.size), UserError)
        facts["errors"].append(message.removeprefix(str(place)))
    return facts


def test_exports_of_the_run_and_of_its_checkpoint_contain_only_the_default_adapter(two_ranks, tiny_pipelines, tmp_path):
    parts = two_ranks.run(export_and_restore, folder=str(tmp_path / "saved"), pipeline=str(tiny_pipelines("sd3")))
    facts = parts[0]
    assert len(facts["names"]) == 18
    assert not any("fake" in name or "teacher" in name for name in facts["names"])
    assert any(not torch.equal(facts["fake"][name], facts["train"][name]) for name in facts["names"])
    assert facts["policies"] == ["ema", "train"]
    assert facts["converted"].keys() == facts["train"].keys()
    assert all(torch.equal(facts["converted"][name], tensor) for name, tensor in facts["train"].items())
    for part in parts:
        assert [error.split(":")[0] for error in part["errors"]] == [
            " has the trained adapters default, fake, but this run trains default",
            " has the trained adapters default, but this run trains default, fake",
        ]


def misuse():
    engine = build("zero2")
    messages = []

    def enter(context):
        with context:
            pass

    def leave_too_early():
        with engine.train_adapter("fake"):
            engine.expect_backwards(2)
            engine.backward(predict(engine.forward_module, [0]).mean(), 2)

    with engine.train_adapter("fake"):
        messages.append(attempt(lambda: enter(engine.train_adapter("default")), RuntimeError))
        with engine.use_policy("fake"):
            messages.append(attempt(engine.step, RuntimeError))
    with engine.use_policy("teacher"):
        messages.append(attempt(lambda: enter(engine.train_adapter("fake")), RuntimeError))
    messages.append(attempt(lambda: enter(engine.train_adapter("teacher")), ValueError))
    messages.append(attempt(lambda: enter(engine.use_policy("other")), ValueError))
    messages.append(attempt(lambda: engine.update_policy("fake", 0.5), ValueError))
    messages.append(attempt(leave_too_early, RuntimeError))
    messages.append(attempt(lambda: enter(engine.train_adapter("fake")), RuntimeError))
    return messages


def test_calls_out_of_order_are_refused(two_ranks):
    for messages in two_ranks.run(misuse):
        assert messages == [
            "train_adapter('default') while fake trains, after 0 backward passes of its step",
            "step inside use_policy('fake'): the weights of another policy are in use",
            "train_adapter('fake') inside use_policy('teacher'): the weights of another policy are in use",
            "teacher is not a trained adapter: default fake",
            "unknown policy other; this engine has train ema ref fake teacher",
            "fake is an adapter without policy copy: only use_policy and train_adapter accept it",
            "call step() in train_adapter('fake'): its backward passes are done",
            "train_adapter('fake') while default trains, after 1 backward passes of its step",
        ]


def first_steps(is_reached):
    """Train `fake` and then `default` with a layer that only `fake`, or no adapter, reaches. Return the messages."""
    module = small_sd3()
    module.idle = torch.nn.Linear(8, 8)
    engine = DenoiserEngine.build(
        module,
        small_recipe("zero2", lora=True, targets=["to_q", "idle"]),
        World.join(),
        lora_targets=TARGETS,
        policies=frozenset(),
        accumulation=1,
        total_updates=1,
        extra_adapters={"fake": FAKE},
        count_flops=False,
    )
    messages = []
    for adapter in ("fake", "default"):
        with engine.train_adapter(adapter):
            loss = predict(engine.forward_module, [engine.world.rank]).mean()
            if is_reached and adapter == "fake":
                loss = loss + module.idle(torch.ones(8)).mean()
            engine.backward(loss, 1)
            messages.append(attempt(engine.step, ModelError))
    return messages


def test_each_adapter_is_checked_for_missing_gradients_in_its_first_step(two_ranks):
    error = "idle.lora_A.weight, idle.lora_B.weight: trained parameters received no gradient"
    for first, second in two_ranks.run(first_steps, is_reached=True):
        assert first == "no error"
        assert second.startswith(error)
    for first, second in two_ranks.run(first_steps, is_reached=False):
        assert first.startswith(error)
        assert second.startswith(error)


def skip_and_spoil(config):
    """Return facts about steps of `fake` that are not applied, and about costs and sizes."""
    engine = build(config)
    train(engine, last=4)
    before, facts = clone_states(engine), {}
    with engine.train_adapter("fake"):
        skipped = engine.skip_step()
        engine.expect_backwards(1)
        loss = predict(engine.forward_module, [0]).mean()
        engine.backward(loss * (float("nan") if engine.world.rank else 1.0), 2)
        spoilt = engine.step()
    after = clone_states(engine)
    facts["rates"] = [skipped.lr, spoilt.lr, skipped.is_applied, spoilt.is_applied]
    facts["unmoved"] = all(torch.equal(after[name], flat) for name, flat in before.items())
    facts["counts"] = [engine.num_updates, engine.adapter_updates["fake"], engine.num_skipped]
    facts["copy"] = [len(flat) for flat in engine.copies["ema"].flats] == engine.shards.lengths()
    flops = []
    for adapter in ("default", "fake"):
        engine.discard_flop_count()
        with engine.train_adapter(adapter):
            run_backwards(engine, 0, "default")
            engine.step()
        count = engine.pop_flop_count()
        flops.append(count and [count.required, count.recomputed])
    facts["flops"] = flops[0] == flops[1]
    return facts


@check_each("stage", ["zero2", "zero3"])
def test_a_step_of_fake_that_is_not_applied_moves_nothing(two_ranks, stage):
    for facts in two_ranks.run(skip_and_spoil, config=stage):
        assert facts["rates"] == [FAKE.lr, FAKE.lr, False, False]
        assert facts["unmoved"]
        assert facts["counts"] == [1, 3, 2]
        assert facts["copy"], "a policy copy contains only the weights of default"
        assert facts["flops"], "a forward pass of fake costs as much as one of default"


def merged_outputs():
    engine = build("zero2")
    train(engine, last=3)
    differences = {}
    for policy in POLICIES:
        with engine.use_policy(policy), torch.no_grad():
            want = predict(engine.forward_module, range(3))
        with engine.use_policy(policy, merge=True):
            got = predict(engine.forward_module, range(3))
        differences[policy] = float((got - want).norm() / want.norm())
    return differences


def test_merged_adapters_predict_alike(two_ranks):
    for differences in two_ranks.run(merged_outputs):
        assert all(difference < 1e-5 for difference in differences.values())
