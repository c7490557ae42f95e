"""ZeRO-3 with hpZ (a weight copy per node) trains and predicts with every policy exactly like plain ZeRO-3."""

import pytest
import torch

from multi_rank.training import build, follow, full_tensors, predict, train_step, write_zero3

NODE = 2  # ranks that share a weight copy, out of four


def train_and_show(config, lora, dtype):
    """Train two steps. Return losses and norms, two predictions of every policy after each step, and the number of
    parameters with a copy in the node."""
    kind = getattr(torch, dtype)
    engine = build(config, lora=lora, model={"dtype": dtype})
    rows, outputs, copies = [], [], 0
    for step in range(2):
        result, loss = train_step(engine, step, kind)
        follow(engine, result)
        rows.append([loss, result.grad_norm])
        for policy in ("old", "train", "ema", "ref"):
            with engine.use_policy(policy), torch.no_grad():
                outputs += [predict(engine.forward_module, [step], kind) for _ in range(2)]
                copies += sum(p.ds_secondary_tensor is not None for p in engine.module.parameters())
    tensors = {policy: full_tensors(engine, policy) for policy in ("train", "old", "ema")}
    return {"rows": rows, "outputs": outputs, "tensors": tensors, "copies": copies}


CASES = {
    "full": {"lora": False, "dtype": "float32", "threshold": 0},
    "adapters": {"lora": True, "dtype": "bfloat16", "threshold": 0},
    "persistent": {"lora": False, "dtype": "bfloat16", "threshold": 100},
}


def run(ranks, folder, threshold, hpz, **settings):
    config = write_zero3(folder, stage3_param_persistence_threshold=threshold, **hpz)
    return ranks.run(train_and_show, config=config, **settings)


@pytest.fixture(scope="module")
def plain(four_ranks, tmp_path_factory):
    """Run all cases without hpZ first, because DeepSpeed keeps the hpZ process groups until the process ends."""
    folder = tmp_path_factory.mktemp("plain")
    return {name: run(four_ranks, folder, hpz={}, **case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_hpz_does_not_change_training_or_predictions(four_ranks, plain, tmp_path, name):
    shared = run(four_ranks, tmp_path, hpz={"zero_hpz_partition_size": NODE}, **CASES[name])
    for got, want in zip(shared, plain[name], strict=True):
        assert got["copies"] > 0 == want["copies"]
        assert got["rows"] == want["rows"]
        assert all(map(torch.equal, got["outputs"], want["outputs"]))
        for policy, tensors in want["tensors"].items():
            assert all(torch.equal(got["tensors"][policy][name], tensor) for name, tensor in tensors.items())
