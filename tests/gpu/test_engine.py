"""The engine has the same losses on a device as on the CPU at every ZeRO stage.

Sequence parallelism in a group of one rank does not change results.
"""

import pytest

STEPS = 4


def losses(config, lora, device):
    """Train with a squared error loss. Return [loss, gradient norm] of each step."""
    import torch

    from multi_rank.training import build, inputs, target

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    engine, found = build(config, lora=lora, policies=(), accumulation=2), []
    assert engine.world.device.type == device
    for step in range(STEPS):
        total = 0.0
        for micro in range(2):
            numbers = [4 * step + 2 * micro, 4 * step + 2 * micro + 1]
            given = {name: value.to(engine.world.device) for name, value in inputs(numbers).items()}
            wanted = torch.stack([target(number)[0] for number in numbers]).to(engine.world.device)
            loss_B = (engine.forward_module(**given, return_dict=False)[0].float() - wanted).square().mean((1, 2, 3))
            engine.backward(loss_B.sum(), 4)
            total += float(loss_B.detach().sum()) / 4
        result = engine.step()
        assert result.is_applied
        found.append([total, result.grad_norm])
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("config", ["zero1", "zero2", "zero3", "zero3_offload"])
def test_losses_equal_those_on_the_cpu(config, lora, there, on_cpu, device):
    # DeepSpeed compiles its CPU Adam kernel for offloaded moments on this machine. The CPU reference runs the same
    # ZeRO stage without offload.
    alone = "zero3" if config == "zero3_offload" else config
    found, expected = there(losses, config=config, lora=lora, device=device), None
    expected = on_cpu(losses, config=alone, lora=lora, device="cpu")
    assert found[0][0] != found[-1][0]
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-3)


def shared_with_oneself(device):
    """Return the largest difference in outputs and gradients between a denoiser with and without sequence parallelism.

    The sequence parallel group has one rank.
    """
    import torch.distributed as dist

    from multi_rank.training import inputs, small_sd3
    from wfm_ds.distributed.world import World, create_sequence_group
    from wfm_ds.ulysses.install import install_ulysses

    world = World.join()
    assert world.device.type == device
    assert dist.get_backend() == ("nccl" if device == "cuda" else "gloo")
    assert world.sum_over_ranks({"x": 2.0}) == {"x": 2.0}
    whole, shared = small_sd3().to(world.device), small_sd3().to(world.device)
    install_ulysses(shared, create_sequence_group(1))
    given = {name: value.to(world.device) for name, value in inputs([0, 1]).items()}
    outputs = [module(**given, return_dict=False)[0] for module in (whole, shared)]
    for output in outputs:
        output.square().mean().backward()
    gradients = zip(whole.parameters(), shared.parameters(), strict=True)
    apart = max(float((a.grad - b.grad).abs().max()) for a, b in gradients if a.grad is not None)
    return max(float((outputs[0] - outputs[1]).abs().max()), apart)


def test_sequence_parallelism_in_a_group_of_one_rank_changes_nothing(there, device):
    assert there(shared_with_oneself, device=device) < 1e-5
