"""FLOPs and bytes of a roofline agree with the counter of benchmarks/flops.py and with single operators."""

import pytest
import torch
from torch import nn

from benchmarks.flops import CountedModel, RecipeCost, latent_shape
from benchmarks.forward_counts import count_flops, flops_by_purpose
from benchmarks.fused_norms import block_rows
from benchmarks.gpu.roofline import count_passes, meta_model, phase_rooflines
from benchmarks.released import RELEASED
from benchmarks.roofline import Attention, Costs, Operators, count_costs, roofline_row
from wfm_ds.recipe.file import load_recipe


def test_flops_of_a_forward_are_those_of_the_counter():
    known = RELEASED["sd35m"]
    costs, tokens, weights = count_costs(known, 2)
    subject = CountedModel.from_released(known)
    expected = count_flops(subject.model, subject.model.latent_shape(*known.size), subject.texts(False)).forward
    assert sum(flops for flops, _ in [*costs.products, *costs.attention]) == 2 * expected
    assert tokens == 1024
    assert weights == pytest.approx(4.5e9, rel=0.02)
    assert all(flops == 0 for flops, _ in costs.others)


def test_an_operator_reads_and_writes_each_tensor_once():
    costs = Costs()
    x, layer = torch.empty(8, 16, device="meta"), nn.Linear(16, 32, bias=False, device="meta")
    with torch.no_grad(), Operators(costs), Attention(costs):
        y = layer(x)
        z = y + y
        z.view(2, 4, 1, 32).transpose(1, 2)
        nn.functional.scaled_dot_product_attention(*[torch.empty(2, 3, 5, 8, device="meta")] * 3)
    assert costs.products == [(2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32 + 8 * 32))]
    assert costs.others == [(0, 4 * 2 * 8 * 32)]
    assert costs.attention == [(4 * 2 * 3 * 5 * 5 * 8, 4 * 4 * 2 * 3 * 5 * 8)]


def test_an_eager_forward_takes_at_least_the_time_of_its_products():
    found = roofline_row("sd35m", tflops=790.0, tbytes=2.9)
    assert found["ms of FLOPs alone"] <= found["ms, products alone"] < found["ms, eager"]
    assert found["most that fusing gains"] == pytest.approx(found["ms, eager"] / found["ms, products alone"])
    slower = roofline_row("sd35m", tflops=790.0, tbytes=1.45)
    assert found["ms, eager"] < slower["ms, eager"] <= 2 * found["ms, eager"]


def test_attention_counts_its_backward_pass():
    costs = Costs()
    query, key, value = (torch.empty(2, 3, 5, 8, device="meta", requires_grad=True) for _ in range(3))
    with Operators(costs), Attention(costs):
        nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    flops, size = 4 * 2 * 3 * 5 * 5 * 8, 4 * 4 * 2 * 3 * 5 * 8
    assert costs.attention == [(flops, size), (5 * flops // 2, 2 * size)]
    assert query.grad.shape == query.shape


def test_the_limits_of_a_recipe_have_the_flops_of_its_counter_and_the_time_of_each_pass(root, tiny_pipelines):
    overrides = [f"model.path={tiny_pipelines('sd3')}", "run.steps=2", "model.max_sequence_length=16"]
    recipe = load_recipe(root / "tests" / "recipes" / "sd3_flow_grpo.yaml", overrides)
    found = {row["phase"]: row for row in phase_rooflines(recipe, 790.0, 2.9, 989.4)}
    subject = CountedModel.from_recipe(recipe)
    cost = RecipeCost.from_recipe(recipe, subject, 1)
    work = flops_by_purpose(cost.steps[1], cost.flops)
    trained = sum(flops.forward + flops.backward for purpose, flops in work.items() if purpose != "rollout")
    assert found["rollout"]["TFLOP"] == pytest.approx(work["rollout"].forward / 1e12)
    assert found["train"]["TFLOP"] == pytest.approx(trained / 1e12)
    # The FLOPs of the passes that were timed: those of the counter, except the scores that attention recomputes.
    model, texts = meta_model(subject.model, recipe), subject.texts(True)
    shape = latent_shape(recipe, model)
    for purpose, count in cost.steps[1].items():
        flops = 0.0
        for passes, costs in count_passes(model, shape, texts, count, trains=purpose == "policy"):
            half = len(costs.attention) // 2 if purpose == "policy" else len(costs.attention)
            forward, backward = costs.attention[:half], costs.attention[half:]
            flops += passes * sum(flops for flops, _ in [*costs.products, *forward])
            flops += passes * sum(4 * flops // 5 for flops, _ in backward)
        expected = work[purpose].forward + work[purpose].backward
        assert flops == pytest.approx(expected, rel=1e-3), purpose
    slower = {row["phase"]: row for row in phase_rooflines(recipe, 790.0, 1.45, 989.4)}
    assert all(slower[phase]["least s, eager"] > row["least s, eager"] for phase, row in found.items())


def test_fused_norms_save_launches_and_bytes_of_a_block():
    forward, both = block_rows()
    # Six RMSNorms of 8 launches; LayerNorms with modulations of 7, 4, 4 and 4 launches, fused 2, 1, 1 and 1; 5 gates.
    assert forward["launches"] - forward["launches, fused"] == 6 * 7 + (7 - 2) + 3 * 3 + 5
    image, text = 2 * 9 * 1024 * 1536 / 1e9, 2 * 9 * 333 * 1536 / 1e9  # GB of a tensor in bfloat16
    # In units of such a tensor: an RMSNorm moves 17, fused 2; a LayerNorm with modulation 6, fused 2; the second
    # modulation 4 more, fused 2 more; a gate 5, fused 3.
    saved = image * (4 * 15 + 4 + 2 + 4 + 3 * 2) + text * (2 * 15 + 2 * 4 + 2 * 2)
    assert forward["GB"] - forward["GB, fused"] == pytest.approx(saved, rel=0.03)
    assert both["GB"] - both["GB, fused"] > 2 * saved


def test_the_limits_of_a_recipe_count_its_fused_norms(root, tiny_pipelines):
    overrides = [f"model.path={tiny_pipelines('sd3')}", "run.steps=2", "model.max_sequence_length=16"]
    path = root / "tests" / "recipes" / "sd3_nft.yaml"
    eager, fused = (
        phase_rooflines(load_recipe(path, [*overrides, f"engine.fused_norms={fused}"]), 790.0, 2.9, 989.4)
        for fused in ("false", "true")
    )
    for before, after in zip(eager, fused, strict=True):
        assert (before["fused norms"], after["fused norms"]) == ("no", "yes")
        assert after["TFLOP"] == before["TFLOP"]
        assert after["least s, eager"] < 0.9 * before["least s, eager"]
