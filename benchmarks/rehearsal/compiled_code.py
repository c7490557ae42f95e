"""Triton code of compiled blocks without a GPU: `python -m benchmarks.rehearsal.compiled_code`.

Compares the sums in the code of an SD3.5 block without and with gradient, and prints them as JSON. If a sum has another
order, the policy ratio of Flow-GRPO differs from 1. A graph is traced on the CPU, moved to a simulated GPU and lowered
by torch's inductor. Triton compiles the sums for sm_90. Nothing runs.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.rehearsal import cuda
from benchmarks.rehearsal.record import Record

CUDA = torch.device("cuda", 0)
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
HEURISTICS = re.compile(r"@triton_heuristics\.(\w+)\((.*?)\n\)\n(?=@triton\.jit)", re.DOTALL)
SUM = re.compile(r'"tt\.reduce"\([^)]*\).*?\}\)\s*:\s*\(tensor<[^,]*,\s*(#\w+)>', re.DOTALL)


class Generated(Exception):
    """Ends the compilation after the code was generated."""


class SumKernel(NamedTuple):
    """A kernel with a sum. Kernels that are equal in all fields sum in the same order."""

    kind: str
    sizes: str
    num_configs: int  # with more than one, a benchmark at run time chooses the order of the sum
    config: str
    layouts: tuple[str, ...]  # of the threads in each sum


def generate_code(
    function: Callable[..., Any], arguments: Sequence[Tensor], options: Mapping[str, Any], *, with_gradient: bool
) -> str:
    """Return inductor's code for CUDA of a forward pass. arguments: on the CPU. options: of torch.compile."""
    from torch._inductor import compile_fx

    lowered: list[str] = []
    lower = compile_fx.compile_fx_inner

    def lower_for_cuda(graph: Any, inputs: Sequence[Any], *, is_backward: bool = False, **settings: Any) -> Any:
        if not is_backward:
            kept: dict[str, Any] = {
                name: settings[name] for name in ("is_inference", "static_input_idxs") if name in settings
            }
            lowered.append(lower_graph(lower, graph, inputs, kept))

        def stop(*_: Any) -> None:
            raise Generated

        stop._boxed_call = True  # type: ignore[attr-defined]  # as inductor's results
        return stop

    def compile_graph(graph: Any, inputs: Any) -> Any:
        patches = {**options, "force_disable_caches": True}
        return compile_fx.compile_fx(graph, inputs, inner_compile=lower_for_cuda, config_patches=patches)

    torch._dynamo.reset()
    with torch.set_grad_enabled(with_gradient), suppress(Generated):
        torch.compile(function, fullgraph=True, dynamic=False, backend=compile_graph)(*arguments)
    (code,) = lowered
    return code


def lower_graph(lower: Callable[..., Any], graph: Any, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Move a traced graph to the simulated GPU and return its code."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    found: list[str] = []

    def keep_code(self: Any) -> None:
        found.append(self.codegen()[0].value)
        raise Generated

    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    with simulate_gpu(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) if isinstance(x, Tensor) else x
            for x in inputs
        ]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        try:
            with mock.patch.object(GraphLowering, "compile_to_module", keep_code), tracing(TracingContext(mode)):
                lower(graph, moved, **settings)
        except Exception:  # inductor wraps Generated in errors of its own
            if not found:
                raise
    return found[0]


@contextmanager
def simulate_gpu() -> Iterator[None]:
    """Simulate an H100 for inductor and for the selection of Triton configurations."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention, misc_patterns
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    with ExitStack() as undone:

        def patch(owner: Any, name: str, value: Any) -> None:
            undone.enter_context(mock.patch.object(owner, name, value, create=True))

        cuda.patch_cuda(patch, Record(), 0, 1)
        properties = torch.cuda.get_device_properties(0)
        patch(CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties))
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        _triton.has_triton.cache_clear()  # it is called before and after the simulation too
        undone.callback(_triton.has_triton.cache_clear)
        patch(_triton, "triton_hash_with_backend", lambda *_: "simulated")
        # These build example tensors on the GPU, for patterns that the blocks do not have.
        patch(fuse_attention, "_sfdp_init", lambda *_: None)
        patch(misc_patterns, "_misc_patterns_init", lambda *_: None)
        yield


def find_sums(code: str) -> set[SumKernel]:
    """Return the kernels with sums in inductor's code."""
    found = set()
    for name, source in KERNEL.findall(code):
        heuristics = HEURISTICS.search(source)
        if heuristics is not None and "reduction" in heuristics[1]:
            found.add(describe_kernel(name, heuristics[1], heuristics[2], HEURISTICS.sub("", source)))
    return found


def describe_kernel(name: str, kind: str, arguments: str, source: str) -> SumKernel:
    """arguments: Python text of the arguments of inductor's decorator. source: code without this decorator."""
    from torch._inductor.runtime import hints, triton_heuristics

    text = arguments.replace("filename=__file__", "filename=''")
    with simulate_gpu():
        configs = eval(  # code that inductor generated
            f"choose({text}, return_configs=True)", {**vars(hints), "choose": getattr(triton_heuristics, kind)}
        )
    sizes, signature = re.search(r"size_hints=(\{.*?\})", text), re.search(r"'signature': (\{.*?\})", text)
    assert sizes is not None
    assert signature is not None
    config = configs[0]
    types = {name: value.strip("'") for name, value in re.findall(r"'(\w+)': ('[^']*')", signature[1])}
    layouts = find_sum_layouts(name, source, types, config.kwargs, config.num_warps)
    return SumKernel(kind, sizes[1], len(configs), f"{config.kwargs} in {config.num_warps} warps", layouts)


def find_sum_layouts(
    name: str, source: str, types: Mapping[str, str], constants: Mapping[str, Any], num_warps: int
) -> tuple[str, ...]:
    """Compile a kernel for sm_90 and return the layouts of the threads in its sums, in order."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
        spec = importlib.util.spec_from_file_location("kernel", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        names = list(types)
        aligned = [i for i, n in enumerate(names) if types[n].startswith("*") or n.endswith("numel")]
        kernel = ASTSource(
            fn=getattr(module, name),
            signature=dict(types),
            constexprs={(names.index(n),): value for n, value in constants.items() if n in names},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        compiled = triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    code = compiled.asm["ttgir"]
    definitions = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    return tuple(definitions.get(name, name) for name in SUM.findall(code))


def sd3_block() -> tuple[nn.Module, list[Tensor]]:
    """Return a block of SD3.5 medium and its inputs: images of 512 pixels and 333 text tokens in a batch of 9."""
    from diffusers.models.attention import JointTransformerBlock

    block = JointTransformerBlock(
        dim=1536,
        num_attention_heads=24,
        attention_head_dim=64,
        context_pre_only=False,
        qk_norm="rms_norm",
        use_dual_attention=True,
    )
    shapes = (9, 1024, 1536), (9, 333, 1536), (9, 1536)
    return block.bfloat16(), [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def main() -> int:
    from wfm_ds.engine.block_compilation import compile_options

    block, inputs = sd3_block()
    found = {}
    for same_sums in (False, True):
        for with_gradient in (False, True):
            code = generate_code(
                block.forward, inputs, compile_options(same_sums=same_sums), with_gradient=with_gradient
            )
            found[f"{same_sums=}, {with_gradient=}"] = sorted(find_sums(code))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
