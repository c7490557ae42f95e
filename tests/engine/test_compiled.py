"""Compiled blocks compared with eager ones: outputs, gradients, graph breaks and the number of compilations."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

from multi_rank.sharing import CASES, built, forwards, run
from wfm_ds.engine.adapter_layers import AdapterMerge, find_adapter_layers
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.engine.block_compilation import MAX_GRAPHS, compile_blocks
from wfm_ds.engine.fp8_linear import Fp8Linear
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.models.registry import model_families
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.deepspeed import build_deepspeed_config

pytestmark = pytest.mark.slow

FAMILIES = {
    "sd3": "sd3",
    "wan, times of tokens": "wan",
    "cosmos25": "cosmos25",
    "sana": "sana",
    "sana_video, times of tokens": "sana_video",
}


class Block(nn.Module):
    """A norm and a gated layer. In bfloat16, the forward uses the same rounded values that the backward pass keeps."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, scale):
        gate, value = self.up(self.norm(x) * (1 + scale) + scale).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * value) * scale


class Blocks(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x, scale):
        for block in self.blocks:
            x = block(x, scale)
        return x


@pytest.fixture
def count():
    """Return a function that returns the number of compiled graphs and of graph breaks since the test started."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def drawn(rows, width=32):
    draw = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 4, width, generator=draw).bfloat16() for _ in range(2)]


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.layers = nn.ModuleList(Fp8Linear(nn.Linear(64, 64), torch.float32, torch.device("cpu")) for _ in range(3))

    def forward(self, x):
        x = x * self.scale
        query, key, value = (layer(x) for layer in self.layers)
        return query + key * value


def test_compiled_float8_layers_quantise_a_shared_input_once(monkeypatch):
    """torch itself merges the calls only in graphs with gradient, so rollouts would not profit."""
    torch._dynamo.reset()
    counted, run_graph = [], GraphLowering.run

    def count(self, *inputs):
        counted.append(sum("quantise_rows" in str(node.target) for node in self.module.graph.nodes))
        return run_graph(self, *inputs)

    monkeypatch.setattr(GraphLowering, "run", count)
    plain = Projections()
    module = nn.Sequential(copy.deepcopy(plain))
    compile_blocks(module, [Projections])
    x = torch.randn(3, 64)
    with torch._inductor.config.patch(force_disable_caches=True):
        with torch.no_grad():
            without = module(x)
        assert torch.equal(module(x), without)
    assert torch.equal(without, plain(x))
    assert counted == [1, 1]


def test_equal_blocks_share_compiled_code_and_gradients_change_no_bit(count):
    torch.manual_seed(0)
    module = Blocks().bfloat16()
    assert compile_blocks(module, [Block]) == 3
    arguments = drawn(2)
    with torch.no_grad():
        without = module(*arguments)
    assert torch.equal(without, module(*arguments).detach())
    # Three graphs: without gradient, with gradient, and with gradient of the input (every block except the first).
    assert count() == (3, 0)
    module(*arguments)
    assert count() == (3, 0)


def test_hooks_of_a_block_are_not_compiled(count):
    module, seen = Blocks(), []
    compile_blocks(module, [Block])
    for block in module.blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(torch.compiler.is_compiling()))
    with torch.no_grad():
        module(*(x.float() for x in drawn(2)))
    assert seen == [False] * 3


def test_a_denoiser_without_repeated_blocks_is_refused():
    with pytest.raises(
        UserError, match=r"engine\.compile: the denoiser has no block of the family's block_classes \(Block"
    ):
        compile_blocks(nn.Linear(2, 2), [Block])
    with pytest.raises(UserError, match=r"block_classes \(nothing\)"):
        compile_blocks(Blocks(), [])


def test_every_thread_may_compile_all_graphs_of_a_run(count):
    module, found = Blocks(), []
    compile_blocks(module, [Block])

    def denoise():
        with torch.no_grad():
            module(*(x.float() for x in drawn(2)))
        found.append(torch._dynamo.config.recompile_limit)
        found.append(torch._dynamo.config.accumulated_recompile_limit)

    thread = threading.Thread(target=denoise)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert min(found) >= MAX_GRAPHS


@pytest.fixture
def tiny(root):
    def load(*overrides):
        return recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", ["engine.compile=true", *overrides])

    return load


def test_zero3_is_refused_unless_it_gathers_outside_the_blocks(tiny):
    config = {"accumulation": 1, "policies": frozenset(), "world_size": 2, "ranks_per_node": 2}
    build_deepspeed_config(tiny(), **config)
    with pytest.raises(RecipeError, match=r"zero3\.json: engine\.compile cannot compile blocks .* use zero2"):
        build_deepspeed_config(tiny("engine.deepspeed=zero3"), **config)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_blocks_on_a_base_in_fewer_bits_are_one_graph_each(precision, count):
    case, block_classes = CASES["sd3"], model_families()["sd3"].block_classes
    eager = built(case, heads=8, lora=True, checkpointing=True)  # all its dimensions are multiples of 16
    assert quantise_base(eager, block_classes, precision, torch.float32, torch.device("cpu"))
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled, block_classes)
    (output,), gradients = run(compiled, case, case.sizes[:1])
    (want,), want_gradients = run(eager, case, case.sizes[:1])
    assert count()[1] == 0
    # A difference in the last float32 bit of an input can change its float8 rounding.
    torch.testing.assert_close(output, want, rtol=1e-3, atol=1e-3)
    assert gradients.keys() == want_gradients.keys()
    for layer, gradient in want_gradients.items():
        assert (gradients[layer] - gradient).norm() <= 1e-2 * gradient.norm(), layer


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_blocks_equal_eager_ones(name, count):
    case, block_classes = CASES[name], model_families()[FAMILIES[name]].block_classes
    eager = built(case, lora=True, checkpointing=True)
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled, block_classes)
    sizes = case.sizes[:1]
    (output,), gradients = run(compiled, case, sizes)
    (want,), want_gradients = run(eager, case, sizes)
    assert (output - want).abs().max() <= 1e-5
    largest = max(float(gradient.abs().max()) for gradient in want_gradients.values())
    assert gradients.keys() == want_gradients.keys()
    for layer, gradient in want_gradients.items():
        error = (gradients[layer] - gradient).abs().max()
        assert error <= 2e-5 * max(gradient.abs().max(), 1e-6 * largest), layer
    with torch.no_grad():
        (without,), _ = forwards(compiled, case, sizes)
    if FAMILIES[name] == "sana_video":  # its last bits depend on the tensors saved for the backward pass
        assert (without - output).abs().max() <= 1e-6
    else:
        assert torch.equal(without, output)
    for module in (compiled, eager):
        module.disable_adapters()
    with torch.no_grad():
        (bare,), _ = forwards(compiled, case, sizes)
        (want_bare,), _ = forwards(eager, case, sizes)
    assert (bare - want_bare).abs().max() <= 1e-5
    assert not torch.equal(bare, without)
    graphs, breaks = count()
    assert breaks == 0
    assert graphs <= 6  # at most two kinds of blocks; each with gradient, without gradient, and without adapters


WAYS = 3  # graphs per size: with gradient, without gradient, and without gradient with merged adapters


@pytest.mark.slow
@pytest.mark.long
def test_a_size_needs_at_most_three_graphs_per_kind_of_block(count):
    case, block_classes = CASES["sd3"], model_families()["sd3"].block_classes
    module = built(case, lora=True)
    compile_blocks(module, block_classes)
    sizes = [(height, width, 5) for height, width in ((3, 3), (2, 4))]
    merge = AdapterMerge(find_adapter_layers(module))

    def rollouts(*, merged):
        """Run a forward without gradient for each size, with the policy's adapter active or merged."""
        if merged:
            merge.merge("default")
            module.disable_adapters()
        with torch.no_grad():
            outputs, _ = forwards(module, case, sizes)
        if merged:
            module.enable_adapters()
            merge.restore()
        return outputs

    found = []
    for _ in range(2):
        apart = rollouts(merged=False)
        together = rollouts(merged=True)
        assert all((a - b).abs().max() <= 1e-4 for a, b in zip(apart, together, strict=True))
        run(module, case, sizes)
        found.append(count())
    kinds = 2  # the last SD3 block does not update the text tokens
    assert found[0] == found[1] == (found[0][0], 0)
    assert found[0][0] <= WAYS * kinds * len(sizes)
    assert MAX_GRAPHS >= 10 * 25, "as many sizes, in five ways each, as docs/performance.md says"
