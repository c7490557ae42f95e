"""Compare outputs and gradients of transformers under sequence parallelism with one process."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from multi_rank.sharing import CASES, built, difference, errors, forwards
from wfm_ds.distributed.world import create_sequence_group
from wfm_ds.errors import UserError
from wfm_ds.models.wan import Experts
from wfm_ds.ulysses import exchange, sana
from wfm_ds.ulysses.install import find_family, install_ulysses, ulysses_families

FORWARD, GRADIENT = 1e-5, 2e-5
VARIANTS = {
    "full": {},
    "full, checkpointed": {"checkpointing": True},
    "lora": {"lora": True},
    "lora, checkpointed": {"lora": True, "checkpointing": True},
}
MAIN = ("sd3", "wan, times of tokens", "cosmos25", "cosmos3", "sana", "sana_video, times of tokens")
QUICK = ("sd3", "wan, times of tokens")  # run in the default tier
NAMES = [pytest.param(name, marks=pytest.mark.unit) if name in QUICK else name for name in CASES]


def variants_on_rank(name):
    """Return the errors of all variants with unequal shards, and of one variant with equal shards and batch size 1."""
    case = CASES[name]
    found = {variant: errors(name, case.sizes, **options) for variant, options in VARIANTS.items()}
    return {**found, "even": errors(name, [case.even], batch=1, heads=6)}


def require_equal(found):
    for variant, error in found.items():
        assert error["forward"] <= FORWARD, (variant, error)
        assert error["gradient"] <= GRADIENT, (variant, error)
        assert error["compared"] > 10


@pytest.mark.unit
def test_every_family_is_among_the_cases():
    built_in = {family for family in ulysses_families().values() if family.__module__.startswith("wfm_ds.")}
    assert len(built_in) == 6
    assert {find_family(built(case)) for case in CASES.values()} >= built_in


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one_process(name, two_ranks):
    for found in two_ranks.run(variants_on_rank, name=name):
        require_equal(found)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.ci_cases("sd3", "wan, times of tokens", "cosmos25, actions")
def test_three_ranks_equal_one_process(name, three_ranks):
    for found in three_ranks.run(variants_on_rank, name=name):
        require_equal(found)


def experts_on_rank():
    """Call two transformers of one module alternately with different shapes, then run one backward pass."""
    case = CASES["wan"]

    def turns(module):
        networks = module.networks
        first, loss = forwards(networks[0], case, case.sizes[:1])
        second, further = forwards(networks[1], case, case.sizes[1:])
        third, last = forwards(networks[0], case, case.sizes[1:], seed=2)
        (loss + further + last).backward()
        outputs = [output.detach() for output in (*first, *second, *third)]
        return outputs, {name: p.grad for name, p in module.named_parameters()}

    whole = Experts({f"expert_{i}": built(case, checkpointing=True, seed=i) for i in range(2)})
    shared = copy.deepcopy(whole)
    install_ulysses(shared, dist.group.WORLD)
    return {"experts": difference(turns(shared), turns(whole))}


def test_transformers_of_one_module_do_not_mix_up_their_shards(two_ranks):
    for found in two_ranks.run(experts_on_rank):
        require_equal(found)


@contextlib.contextmanager
def counted(calls):
    """Append the name of each torch.distributed call to `calls`, with ", uneven" if the shards are unequal."""

    def wrapped(name):
        stock = getattr(dist, name)

        def collective(*args, **kwargs):
            calls.append(name if len(args) < 3 else f"{name}, uneven")
            return stock(*args, **kwargs)

        return mock.patch.object(exchange.dist, name, collective)

    with wrapped("all_to_all_single"), wrapped("all_reduce"):
        yield


def collectives_on_rank(name, size, **options):
    case, calls = CASES[name], {"forward": [], "backward": [], "without gradient": []}
    transformer = built(case, **options)
    install_ulysses(transformer, dist.group.WORLD)
    with counted(calls["forward"]):
        outputs, loss = forwards(transformer, case, [size])
    with counted(calls["backward"]):
        loss.backward()
    with torch.no_grad(), counted(calls["without gradient"]):
        again, _ = forwards(transformer, case, [size])
    assert torch.equal(again[0], outputs[0])
    assert calls["without gradient"] == calls["forward"]
    return {way: {kind: calls[way].count(kind) for kind in set(calls[way])} for way in ("forward", "backward")}


EVEN, UNEVEN = "all_to_all_single", "all_to_all_single, uneven"
# Each model has two blocks. An attention needs two exchanges, also for image and text together. The output needs one.
COLLECTIVES = {
    "sd3, whose first block has an attention of the image besides": (
        {"name": "sd3", "size": (4, 6, 12), "heads": 6},
        {"forward": {EVEN: 7}, "backward": {EVEN: 6}},
    ),
    "wan": (
        {"name": "wan", "size": (6, 2, 3), "heads": 6},
        {"forward": {EVEN: 5}, "backward": {EVEN: 4}},
    ),
    "wan, recomputed, in shares that differ": (
        {"name": "wan", "size": (5, 1, 5), "heads": 5, "checkpointing": True},
        {"forward": {UNEVEN: 5}, "backward": {UNEVEN: 8}},
    ),
    "sana": (
        {"name": "sana", "size": (5, 3)},
        {"forward": {"all_reduce": 2, UNEVEN: 3}, "backward": {"all_reduce": 2, UNEVEN: 2}},
    ),
    "sana_video": (
        {"name": "sana_video", "size": (5, 1, 5)},
        {"forward": {"all_reduce": 2, UNEVEN: 3}, "backward": {"all_reduce": 2, UNEVEN: 2}},
    ),
}


@pytest.mark.parametrize("case", COLLECTIVES)
def test_the_number_of_collectives_is_minimal(case, two_ranks):
    arguments, expected = COLLECTIVES[case]
    assert two_ranks.run(collectives_on_rank, **arguments) == [expected] * 2


def low_precision_on_rank(name):
    """Return the error of bfloat16 against float32 in one process, and of sequence parallelism against one process."""
    case = CASES[name]
    exact = built(case)
    whole = copy.deepcopy(exact).to(torch.bfloat16)
    shared = copy.deepcopy(whole)
    install_ulysses(shared, dist.group.WORLD)
    inputs = case.inputs(torch.Generator().manual_seed(0), *case.sizes[0])
    low = {name: low_precision(name, argument) for name, argument in inputs.items()}
    with torch.no_grad():
        outputs = [
            module(**given, **CASES[name].options)[0]
            for module, given in ((exact, inputs), (whole, low), (shared, low))
        ]
    assert [output.dtype for output in outputs] == [torch.float32, torch.bfloat16, torch.bfloat16]
    exact_output, whole_output, shared_output = (output.float() for output in outputs)
    return [float((whole_output - exact_output).abs().max()), float((shared_output - whole_output).abs().max())]


def low_precision(name, argument):
    return argument if name in ("timestep", "time") or not argument.is_floating_point() else argument.to(torch.bfloat16)


@pytest.mark.parametrize("name", MAIN)
def test_sequence_parallelism_adds_no_error_in_low_precision(name, two_ranks):
    for of_whole, of_shares in two_ranks.run(low_precision_on_rank, name=name):
        assert of_shares <= 2 * of_whole


def refusals_on_rank():
    """Return the error messages of unsupported models and inputs, from install_ulysses or the first forward."""

    def attempt(name, size=None, change=lambda transformer: None, heads=5, **arguments):
        transformer = built(CASES[name], heads=heads)
        change(transformer)
        try:
            install_ulysses(transformer, dist.group.WORLD)
            transformer(**CASES[name].inputs(torch.Generator(), *(size or CASES[name].even)), **arguments)
        except UserError as error:
            return str(error)
        return "no error"

    def fuse(transformer):
        for block in transformer.blocks:
            block.attn1.fuse_projections()

    def share(transformer):
        install_ulysses(transformer, dist.group.WORLD)

    residuals = [torch.zeros(())]
    return {
        "fused": attempt("wan", change=fuse),
        "twice": attempt("sana", change=share),
        "one head": attempt("cosmos25", heads=1),
        "residuals": attempt("sd3", block_controlnet_hidden_states=residuals),
        "residuals of sana": attempt("sana", controlnet_block_samples=residuals),
        "mask": attempt("sana_video", attention_mask=torch.ones(2, 36)),
        "one row": attempt("sana", size=(1, 5)),
        "one frame": attempt("sana_video", size=(1, 4, 4)),
        "one word": attempt("sd3", size=(4, 4, 1)),
        "one token": attempt("wan", size=(1, 1, 1)),
    }


REFUSALS = {
    "fused": "WanTransformer3DModel does not support sequence parallelism: blocks.0.attn1 has fused projections; call "
    "unfuse_qkv_projections() first",
    "twice": "SanaTransformer2DModel does not support sequence parallelism: its attention uses "
    f"{sana.SanaLinearAttention.__name__}, not SanaLinearAttnProcessor2_0",
    "one head": "engine.sequence_parallel = 2 exceeds the number of attention heads of CosmosTransformer3DModel, 1; "
    "set it to 1 or less",
    "residuals": "SD3Transformer2DModel does not support sequence parallelism: ControlNet residuals "
    "(block_controlnet_hidden_states) are not supported",
    "residuals of sana": "SanaTransformer2DModel does not support sequence parallelism: ControlNet residuals "
    "(controlnet_block_samples) are not supported",
    "mask": "SanaVideoTransformer3DModel does not support sequence parallelism: masks of self-attention "
    "(attention_mask) are not supported",
    "one row": "engine.sequence_parallel = 2 exceeds the number of rows of patches, 1; set it to 1 or less",
    "one frame": "engine.sequence_parallel = 2 exceeds the number of latent frames, 1; set it to 1 or less",
    "one word": "engine.sequence_parallel = 2 exceeds the number of text tokens, 1; set it to 1 or less",
    "one token": "engine.sequence_parallel = 2 exceeds the number of tokens, 1; set it to 1 or less",
}


def test_unsupported_models_and_inputs_are_refused(two_ranks):
    for messages in two_ranks.run(refusals_on_rank):
        assert messages == REFUSALS


def groups_on_rank():
    return {
        "size": dist.get_world_size(create_sequence_group(2)),
        "alone": dist.get_world_size(create_sequence_group(1)),
    }


def refused_group_on_rank():
    with pytest.raises(UserError, match=r"engine\.sequence_parallel = 3 does not divide the 2 ranks; use one of 1, 2"):
        create_sequence_group(3)


def test_groups_have_neighbouring_ranks_and_equal_sizes(two_ranks):
    assert two_ranks.run(groups_on_rank) == [{"size": 2, "alone": 1}] * 2
    two_ranks.run(refused_group_on_rank)
