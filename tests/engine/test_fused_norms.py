"""Fused norms compared with the modules of diffusers: results, gradients, names, and an unchanged policy ratio."""

import copy
from collections import Counter

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock

from each_case import check_each
from families import CASES
from multi_rank.resuming import tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_same_runs, records
from multi_rank.sharing import CASES as SHARING_CASES
from multi_rank.sharing import built, run
from wfm_ds.contract.family_under_test import FamilyUnderTest
from wfm_ds.engine.fused_norms import FORWARDS, can_fuse, fuse_norms
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file

DEFAULT, SLOW = (
    ("sd3", "wan21", "flux_kontext", "flux2"),
    ("cosmos25", "cosmos3", "world", "wan21_i2v", "wan22_ti2v", "wan_vace"),
)
OTHERS = (
    *("qwen_image", "qwen_image_edit_plus", "z_image", "ltx2", "hunyuan_video15"),
    *("sana", "sana_video", "sana_wm", "flux2_dev"),
)
VARIANTS = (
    "wan, times of tokens",
    "cosmos25, image embeddings, learnt positions",
    "sana, normed queries, patches of two",
    "sana_video, times of tokens",
)
BF16 = torch.bfloat16


def find_classes(module):
    return Counter(type(part).__name__ for part in module.modules() if type(part) in FORWARDS and can_fuse(part))


def watch_owners(module):
    """Return the list of calls of modules that own parameters. ZeRO-3 gathers the parameters at these calls."""
    calls = []
    for name, part in module.named_modules():
        if any(True for _ in part.parameters(recurse=False)):
            part.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    return calls


def predict(model, arguments):
    """Return the prediction, and the gradients by parameter."""
    model.unwrapped_denoiser.zero_grad()
    prediction = model.denoise(*arguments)
    weights = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(1))
    (prediction * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.unwrapped_denoiser.named_parameters() if p.grad is not None}
    return prediction.detach(), gradients


def require_equal_gradients(got, want, tolerance):
    assert got.keys() == want.keys()
    largest = max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        error = (got[name] - gradient).float().norm()
        assert error <= tolerance * max(float(gradient.norm()), 2e-3 * largest), (name, float(error / gradient.norm()))


@pytest.mark.parametrize("family", [*DEFAULT, *(pytest.param(f, marks=pytest.mark.slow) for f in (*SLOW, *OTHERS))])
def test_results_are_the_bits_of_diffusers_and_gradients_differ_by_rounding(family, tiny_pipelines):
    subject = FamilyUnderTest(tiny_pipelines(family), CASES[family])
    for dtype, tolerance in ((torch.float32, 1e-4), (BF16, 0.08)):  # depends on the CPU
        model = subject.load_model(dtype)
        denoiser, arguments = model.unwrapped_denoiser, subject.denoise_arguments(model)
        denoiser.requires_grad_(True)
        if family == "sana_wm":  # products of transposed tensors round differently, and only diffusers has them
            denoiser.x_embedder.register_forward_hook(lambda *call: call[-1].contiguous())
        calls = watch_owners(denoiser)
        want, want_gradients = predict(model, arguments)
        names, classes, owners = list(denoiser.state_dict()), find_classes(denoiser), Counter(calls)
        assert fuse_norms(denoiser) == classes.total() > 0
        calls.clear()
        got, gradients = predict(model, arguments)
        assert Counter(calls) == owners
        assert torch.equal(got, want), (dtype, float((got - want).abs().max()))
        with torch.no_grad():
            assert torch.equal(model.denoise(*arguments), want)
        require_equal_gradients(gradients, want_gradients, tolerance)
        assert list(denoiser.state_dict()) == names
        assert find_classes(denoiser) == classes


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_blocks_equal_those_of_diffusers(name):
    """Wan with a norm before cross-attention, Cosmos with two cross-attentions, and SANA with norms of queries."""
    case = SHARING_CASES[name]
    plain = built(case)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    owners, want_owners = watch_owners(fused), watch_owners(plain)
    (got,), gradients = run(fused, case, case.sizes[:1])
    (want,), want_gradients = run(plain, case, case.sizes[:1])
    assert torch.equal(got, want)
    require_equal_gradients(gradients, want_gradients, 1e-4)
    assert owners == want_owners


@check_each("adaln", [False, True])
@check_each("directions", [(True, True), (True, False), (False, True), (False, False)])
def test_blocks_of_ltx2_and_ltx23_equal_those_of_diffusers(adaln, directions):
    torch.manual_seed(0)
    sizes = {"dim": 32, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32}
    sound = {"audio_dim": 16, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8}
    plain = LTX2VideoTransformerBlock(
        **sizes, **sound, audio_cross_attention_dim=16, video_cross_attn_adaln=adaln, audio_cross_attn_adaln=adaln
    )
    fused = torch.nn.ModuleList([copy.deepcopy(plain)])
    # the block and its norms; the norms of queries and keys are torch.nn.RMSNorm, one kernel already
    assert fuse_norms(fused) == 9
    times = {"temb": (1, 9 if adaln else 6, 32), "temb_audio": (4, 9 if adaln else 6, 16)}
    times |= {"temb_ca_scale_shift": (5, 4, 32), "temb_ca_audio_scale_shift": (1, 4, 16)}
    times |= {"temb_ca_gate": (1, 1, 32), "temb_ca_audio_gate": (1, 1, 16)}
    inputs = {name: torch.randn(2, tokens, parts * n) for name, (tokens, parts, n) in times.items()}
    states = {"hidden_states": (5, 32), "audio_hidden_states": (4, 16)}
    states |= {"encoder_hidden_states": (3, 32), "audio_encoder_hidden_states": (3, 16)}
    inputs |= {name: torch.randn(2, *shape) for name, shape in states.items()}
    inputs |= dict(zip(("use_a2v_cross_attention", "use_v2a_cross_attention"), directions, strict=True))
    for prompt_times in (False, True) if adaln else (False,):
        if prompt_times:
            inputs |= {"temb_prompt": torch.randn(2, 3, 64), "temb_prompt_audio": torch.randn(2, 3, 32)}
        for got, want in zip(fused[0](**inputs), plain(**inputs), strict=True):
            assert torch.equal(got, want)


def sharded_on_rank(name):
    """Return the differences between fused norms under sequence parallelism and diffusers' modules in one process."""
    import torch.distributed as dist

    from multi_rank.sharing import difference
    from wfm_ds.ulysses.install import install_ulysses

    case = SHARING_CASES[name]
    whole = built(case, checkpointing=True)
    shared = copy.deepcopy(whole)
    install_ulysses(shared, dist.group.WORLD)
    fuse_norms(shared)
    return difference(run(shared, case, case.sizes[:1]), run(whole, case, case.sizes[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "wan, times of tokens", "cosmos25", "sana", "sana_video, times of tokens"])
def test_sequence_parallelism_and_checkpointing_work_with_fused_norms(name, two_ranks):
    for found in two_ranks.run(sharded_on_rank, name=name):
        assert found["forward"] <= 1e-5
        assert found["gradient"] <= 1e-4


@pytest.mark.slow
@pytest.mark.ci_cases("wan21")  # others take up to a minute
@pytest.mark.parametrize(
    "family",
    [
        "sd3",
        "wan21",
        "wan22_ti2v",
        "cosmos25",
        "flux_kontext",
        "qwen_image",
        "hunyuan_video15",
        "ltx2",
        "sana_video",
        "sana_wm",
        "z_image",
    ],
)
def test_triton_kernels_compute_the_same_with_other_orders_of_sums(family, tiny_pipelines, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("WFM_KERNELS", "triton")
    subject = FamilyUnderTest(tiny_pipelines(family), CASES[family])
    model = subject.load_model()
    arguments = subject.denoise_arguments(model)
    model.unwrapped_denoiser.requires_grad_(True)
    want, want_gradients = predict(model, arguments)
    fuse_norms(model.unwrapped_denoiser)
    got, gradients = predict(model, arguments)
    assert 0 < (got - want).norm() <= 1e-5 * want.norm()
    require_equal_gradients(gradients, want_gradients, 1e-4)
    half = subject.load_model(BF16)  # with and without gradients, so the policy ratio of equal weights is 1
    fuse_norms(half.unwrapped_denoiser)
    with torch.no_grad():
        without = half.denoise(*arguments)
    assert torch.equal(half.denoise(*arguments).detach(), without)


def test_a_copy_of_a_denoiser_uses_its_own_weights(tiny_pipelines):
    subject = FamilyUnderTest(tiny_pipelines("sd3"), CASES["sd3"])
    model = subject.load_model()
    fuse_norms(model.unwrapped_denoiser)
    twin = copy.deepcopy(model.unwrapped_denoiser)
    for part in twin.modules():
        if type(part) in FORWARDS and can_fuse(part):
            assert part.forward.args == (part,)


def test_a_denoiser_without_norms_to_fuse_is_refused(root):
    with pytest.raises(RecipeError, match=r"engine\.fused_norms: the denoiser has no norm that can be fused"):
        fuse_norms(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)))
    words = ["engine.fused_norms=true", "engine.compile=true"]
    with pytest.raises(RecipeError, match=r"engine\.compile fuses norms itself: remove one of the two keys"):
        recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", words)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), [("sd3_flow_grpo", "zero2"), ("sd3_nft", "zero3")])
def test_a_run_equals_the_run_without_fused_norms(name, config, one_rank, tiny_pipelines, tmp_path):
    for fused in ("false", "true"):
        words = ["logging.console=false", "optimizer.eps=1e-4", f"engine.fused_norms={fused}"]
        words += [f"engine.deepspeed={config}"]
        if name == "sd3_flow_grpo":
            words += ["algorithm.old_log_prob=rollout", "algorithm.updates_per_rollout=1"]
        one_rank.run(train_on_rank, **tiny_recipe(name, tmp_path / fused, tiny_pipelines("sd3"), *words))
    assert_same_runs(tmp_path / "false", tmp_path / "true")
    first = next(line for line in records(tmp_path / "true") if line.get("step") == 1)
    tag = "policy/ratio_max_abs_dev" if name == "sd3_flow_grpo" else "nft/old_deviation"
    assert first[tag] == 0  # rollout and training compute the same bits
