"""Policy copies: exact EMA, exact swaps of weights, full tensors gathered from shards."""

import pytest
import torch

from multi_rank.training import build, follow, full_tensors, plain_step, predict, small_sd3, write_zero3
from ranks import attempt
from wfm_ds.engine.optimizer_steps import ema_decay

STAGES = pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
SOME = pytest.mark.parametrize(
    ("stage", "dtype", "lora"),
    [
        ("zero1", "float32", True),
        ("zero1", "bfloat16", False),
        ("zero2", "float32", False),
        ("zero2", "bfloat16", True),
        ("zero3", "float32", False),
        ("zero3", "bfloat16", True),
        ("zero3", "bfloat16", False),
    ],
)


def follow_gathered_masters(config, lora, dtype, every):
    """Compare the engine's EMA with an EMA over gathered master weights (rank 0). Return also each rank's names."""
    sections = {"model": {"dtype": dtype}, "ema": {"decay": 0.25, "every": every}}
    engine = build(config, lora=lora, policies={"ema"}, accumulation=1, **sections)
    names = [name for name, _ in engine.iter_full_tensors("ema")]
    average = full_tensors(engine, "train")
    for step in range(3):
        plain_step(engine, step, getattr(torch, dtype))
        engine.update_ema()
        engine.update_ema()  # a second call per update must not change the EMA
        theta, decay = full_tensors(engine, "train"), ema_decay(0.25, step + 1)
        if (step + 1) % every == 0 and theta:
            torch._foreach_lerp_(list(average.values()), list(theta.values()), 1 - decay)
    got, theta = full_tensors(engine, "ema"), full_tensors(engine, "train")
    equal = [torch.equal(got[name], average[name]) for name in average]
    differs = [not torch.equal(got[name], theta[name]) for name in average]
    return {"equal": all(equal), "moved": any(differs), "names": names, "num": len(average)}


@SOME
def test_the_ema_equals_an_ema_of_the_gathered_master_weights(two_ranks, stage, dtype, lora):
    every = 1 if dtype == "float32" else 2
    main, other = two_ranks.run(follow_gathered_masters, config=stage, lora=lora, dtype=dtype, every=every)
    assert main["num"] == (18 if lora else 85)
    assert main["equal"]
    assert main["moved"]
    assert other["num"] == 0, "only rank 0 gets tensors"
    assert main["names"] == other["names"]


def whole_tensors(config, lora):
    return full_tensors(build(config, lora=lora, policies=()), "train")


@STAGES
def test_full_tensors_before_training_are_the_module_s_own(two_ranks, stage):
    want = small_sd3().state_dict()
    got, nothing = two_ranks.run(whole_tensors, config=stage, lora=False)
    assert nothing == {}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@STAGES
def test_lora_tensors_have_no_adapter_name_and_start_at_zero_effect(two_ranks, stage):
    got, _ = two_ranks.run(whole_tensors, config=stage, lora=True)
    assert len(got) == 2 * 9  # A and B of to_q, to_v, to_out.0, in two attentions of block 0 and one of block 1
    assert got["transformer_blocks.0.attn.to_q.lora_A.weight"].shape == (4, 32)
    assert all(bool((tensor == 0).all()) == ("lora_B" in name) for name, tensor in got.items())


def trainable_names(engine):
    return [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def swap_and_return(config, lora, dtype):
    """Swap every policy in and out. Return bitwise comparisons of this rank's state, and the errors inside a swap."""
    kind = getattr(torch, dtype)
    engine = build(config, lora=lora, accumulation=1, model={"dtype": dtype})
    follow(engine, plain_step(engine, 0, kind))
    with torch.no_grad():
        before = predict(engine.forward_module, range(3), kind)
    masters = [flat.clone() for flat in engine.shards.master_weights()]
    copies = [flat.clone() for copy in engine.copies.values() for flat in copy.flats]
    refusals, others, trainable = [], [], trainable_names(engine)
    same_trainable = []
    for policy in sorted(engine.policies):
        with engine.use_policy(policy):
            others.append(predict(engine.forward_module, range(3), kind))
            same_trainable.append(trainable_names(engine) == trainable)
            attempts = (
                lambda: engine.backward(before.sum(), 1),
                engine.step,
                lambda: engine.use_policy("train").__enter__(),
                lambda: engine.update_policy("old", 0.5),
            )
            refusals += [attempt(call, RuntimeError) for call in attempts]
    with torch.no_grad():
        after = predict(engine.forward_module, range(3), kind)
    same_masters = all(map(torch.equal, engine.shards.master_weights(), masters))
    same_copies = all(map(torch.equal, [f for c in engine.copies.values() for f in c.flats], copies))
    return {
        "same": [torch.equal(before, after), same_masters, same_copies, plain_step(engine, 1, kind).is_applied],
        "same_trainable": [*same_trainable, trainable_names(engine) == trainable],
        "differ": [not torch.equal(before, output) for output in others],
        "gradient": [not output.requires_grad for output in others],
        "refusals": refusals,
    }


@SOME
def test_swapping_a_policy_in_and_out_restores_everything(two_ranks, stage, dtype, lora):
    for part in two_ranks.run(swap_and_return, config=stage, lora=lora, dtype=dtype):
        assert all(part["same"])
        assert all(part["same_trainable"])
        assert all(part["differ"])
        assert all(part["gradient"])
        assert len(part["refusals"]) == 3 * 4
        assert all("inside use_policy(" in text for text in part["refusals"])


def merge_and_return(config, dtype):
    """Merge every policy's adapter. Return the errors of merged predictions, and whether parameters stayed equal."""
    kind = getattr(torch, dtype)
    engine = build(config, lora=True, accumulation=1, model={"dtype": dtype})
    follow(engine, plain_step(engine, 0, kind))
    policies = ("train", *sorted(engine.policies))
    for policy in policies:
        with engine.use_policy(policy):
            pass  # the engine writes the adapter only when a forward needs it
    before, trainable, found = [p.clone() for p in engine.module.parameters()], trainable_names(engine), {}
    for policy in policies:
        with engine.use_policy(policy), torch.no_grad():
            want = predict(engine.forward_module, range(3), kind)
        with engine.use_policy(policy, merge=True):
            got = predict(engine.forward_module, range(3), kind)
            refused = "inside use_policy(" in attempt(engine.step, RuntimeError)
        found[policy] = float((got - want).norm() / want.norm()), refused and not got.requires_grad
    same = all(map(torch.equal, engine.module.parameters(), before)) and trainable_names(engine) == trainable
    return found, same, plain_step(engine, 1, kind).is_applied


@pytest.mark.parametrize(("stage", "dtype"), [("zero1", "float32"), ("zero2", "float32"), ("zero2", "bfloat16")])
def test_merged_policies_predict_alike_and_unmerging_restores_the_weights(two_ranks, stage, dtype):
    for found, same, applied in two_ranks.run(merge_and_return, config=stage, dtype=dtype):
        assert found.keys() == {"train", "old", "ref", "ema"}
        assert all(difference < (1e-5 if dtype == "float32" else 2e-2) for difference, _ in found.values())
        assert found["ref"][0] == 0, "it has no adapter to merge"
        assert all(guarded for _, guarded in found.values())
        assert same
        assert applied


def writes_of_an_average(config):
    """Return whether the EMA adapter changed after optimizer steps alone, and after use_policy("ema")."""
    engine = build(config, lora=True, policies={"ema"}, accumulation=1)
    adapter = [parameter for name, parameter in engine.module.named_parameters() if ".ema." in name]
    start = [parameter.detach().clone() for parameter in adapter]
    for step in range(2):
        plain_step(engine, step, torch.float32)
        engine.update_ema()
    written = [not all(map(torch.equal, adapter, start))]
    with engine.use_policy("ema"):
        written.append(not all(map(torch.equal, adapter, start)))
    average = full_tensors(engine, "ema")
    named = {name.replace(".ema.", "."): p for name, p in engine.module.named_parameters() if ".ema." in name}
    return {"written": written, "right": all(torch.equal(average[name], named[name]) for name in average)}


def test_the_ema_adapter_is_written_only_when_a_forward_uses_it(two_ranks):
    for part in two_ranks.run(writes_of_an_average, config="zero2"):
        assert part == {"written": [False, True], "right": True}


OF_REWARDS = {
    "data": {"kind": "prompts"},
    "algorithm": {"name": "diffusion_nft"},
    "reward": {"functions": [{"name": "color"}]},
    "rollout": {"cuda_graph": True},
}


def replay_and_train(config, lora):
    """Run forwards outside and inside replay_graphs, before and after an optimizer step.

    Return the numbers of recordings, whether replays equal plain forwards, and whether replays change with the weights.
    """
    engine = build(config, lora=lora, policies={"old"}, accumulation=1, **OF_REWARDS)
    recordings, equal, outputs = [], [], []
    for step in range(2):
        for policy in ("train", "old"):
            with engine.use_policy(policy), torch.no_grad():
                want = predict(engine.forward_module, range(3))
                recordings.append(len(engine.graphs.recordings))
                with engine.replay_graphs():
                    outputs.append(predict(engine.forward_module, range(3)))
                recordings.append(len(engine.graphs.recordings))
            equal.append(torch.equal(outputs[-1], want))
        plain_step(engine, step)
        engine.update_policy("old", 0.5)
    return recordings, equal, [not torch.equal(outputs[i], outputs[i + 2]) for i in range(2)]


@pytest.mark.parametrize(("stage", "lora"), [("zero1", True), ("zero2", True), ("zero2", False)])
def test_graph_replays_use_weights_that_change_in_place(two_ranks, stage, lora):
    for recordings, equal, moved in two_ranks.run(replay_and_train, config=stage, lora=lora):
        assert recordings == [0, 1, 1, 2, 2, 2, 2, 2], "one for each policy, of which no step moves the weights"
        assert all(equal)
        assert all(moved)


def swap_after_step(config):
    """Return the output of the initial module, and the output of ref directly after a step."""
    engine = build(config, lora=False, accumulation=1)
    with torch.no_grad():
        initial = predict(engine.forward_module, range(3))
    plain_step(engine, 0)
    with engine.use_policy("ref"):
        return {"initial": initial, "ref": predict(engine.forward_module, range(3))}


def test_swap_directly_after_a_step_shows_the_initial_weights(two_ranks, tmp_path):
    config = write_zero3(tmp_path, stage3_param_persistence_threshold=100_000)
    for part in two_ranks.run(swap_after_step, config=config):
        assert torch.equal(part["ref"], part["initial"])


def copy_policies(config, lora):
    """Update old with decay 0.5 and 0. Compare with the expected weights, and return errors for unknown policies."""
    engine = build(config, lora=lora, policies={"old"}, accumulation=1)
    first = full_tensors(engine, "old")
    plain_step(engine, 0)
    engine.update_policy("old", 0.5)
    half, theta = full_tensors(engine, "old"), full_tensors(engine, "train")
    engine.update_policy("old", 0.0)
    whole = full_tensors(engine, "old")
    attempts = (
        lambda: engine.update_policy("ema", 0.5),
        lambda: engine.update_policy("ref", 0.5),
        lambda: engine.use_policy("ref").__enter__(),
        lambda: next(engine.iter_full_tensors("rel")),
    )
    return {
        "copied": [torch.equal(whole[n], theta[n]) for n in theta],
        "middle": [torch.allclose(half[n], (first[n] + theta[n]) / 2, rtol=0, atol=1e-7) for n in theta],
        "refusals": [attempt(call, ValueError) for call in attempts],
    }


@pytest.mark.parametrize(("stage", "lora"), [("zero2", True), ("zero3", False)])
def test_old_policy_moves_by_its_decay(two_ranks, stage, lora):
    parts = two_ranks.run(copy_policies, config=stage, lora=lora)
    for part in parts:
        assert all(part["copied"])
        assert all(part["middle"])
        assert "no error" not in part["refusals"]
        assert part["refusals"][0] == "unknown policy ema; this engine has train old"
    assert parts[0]["copied"]
