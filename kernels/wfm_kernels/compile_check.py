"""`python -m wfm_kernels.compile_check`: compile every kernel for sm_90 without a GPU and check the generated code.

The command reports register spills, memory accesses of less than 16 bytes, fused multiply-adds, and kernels that sum in
a different order in rollout and training. The exit code is 1 if a check fails, and 3 if Triton is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1}
ACCESS_BYTES = 16
SCALAR_TYPES = {"n": "i32", "batch": "i32", "coef_stride": "i32", "beta": "fp32", "eps": "fp32"}
SCALAR_TYPES |= dict.fromkeys(("rows", "tokens", "tiles", "d1", "d2"), "i32")
STRIDES = {f"{tensor}s{axis}" for tensor in "xogdch" for axis in range(3)}  # between rows of a tensor
SCALAR_TYPES |= dict.fromkeys(STRIDES, "i32")
NUM_NOISE_FMA = 108  # fused multiply-adds in the logarithm, sine and cosine of the noise, with Triton 3.6 to 3.9


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    kernel: str
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    reads: tuple[str, ...] = ()  # dtypes of the tensors of the latents' size that the kernel reads
    writes: tuple[str, ...] = ()  # dtypes of the tensors of the latents' size that the kernel writes
    warps: int = 8
    max_registers: int = 80
    draws_noise: bool = False

    def wide_accesses(self, dtypes: tuple[str, ...]) -> int:
        """Return how many 16-byte accesses a thread needs for one tile of each tensor. dtypes: the tensors' dtypes."""
        per_thread = self.constants["BLOCK"] * self.constants.get("ROWS", 1) // (32 * self.warps)
        return sum(per_thread * BYTES[dtype] // ACCESS_BYTES for dtype in dtypes)


@dataclass(kw_only=True)
class CompileReport:
    variant: KernelVariant
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    wide_reads: int = 0
    wide_writes: int = 0
    fma: int = 0
    layout: str = ""  # thread layout of the tensor that is summed over a tile
    faults: list[str] = field(default_factory=list)


def kernel_variants() -> list[KernelVariant]:
    return [
        *_sde_variants(),
        *_gradient_variants(),
        *_nft_variants(),
        *_noise_variants(),
        *_row_variants(),
        *_norm_variants(),
        *_finish_variants(),
    ]


def find_kernel(name: str) -> Any:
    from wfm_kernels import norm_kernels, triton_kernels

    return getattr(triton_kernels, name, None) or getattr(norm_kernels, name)


def _make_variant(kernel: str, label: str, dtypes: Mapping[str, str | None], **options: Any) -> KernelVariant:
    """dtypes: {name of a pointer argument without `_ptr`: its dtype (default float32), or None if it is not passed}.

    options: constants of the kernel, and fields of KernelVariant.
    """
    types, constants = {}, {}
    for name in find_kernel(kernel).arg_names:
        if name in options:
            constants[name] = options.pop(name)
        else:
            dtype = dtypes.get(name.removesuffix("_ptr"), "fp32")
            types[name] = SCALAR_TYPES.get(name) or ("none" if dtype is None else f"*{dtype}")
    return KernelVariant(kernel=kernel, label=label, types=types, constants=constants, **options)


def _sde_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK

    for v, x in [("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")]:
        for mode, more_reads in {"given": (x,), "noise": ("fp32",), "seeds": ()}.items():
            noise = {"z": "fp32" if mode == "noise" else None, "seed": "i64" if mode == "seeds" else None}
            yield _make_variant(
                "sde_kernel",
                f"{mode} v {v} x {x}",
                {"v": v, "x": x, "out": x, "mean": None, "coef": "fp64"} | noise,
                reads=(v, x, *more_reads),
                writes=() if mode == "given" else (x,),
                draws_noise=mode == "seeds",
                GIVEN=mode == "given",
                TILES=2,
                SPLIT=512,
                BLOCK=BLOCK,
            )


def _gradient_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK

    for v in ("bf16", "fp32"):
        dtypes = {"v": v, "dv": v, "coef": "fp64"}
        reads = (v, "fp32", "fp32")
        yield _make_variant("sde_gradient_kernel", f"v {v} x fp32", dtypes, reads=reads, writes=(v,), BLOCK=BLOCK)


def _nft_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK, NFT_BLOCK, NFT_WARPS

    for v in ("bf16", "fp32"):
        for ref in (None, v):
            label = f"v {v}{' with ref' if ref else ''}"
            dtypes = {"v": v, "old": v, "ref": ref, "dv": v, "upstream_kl": "fp32" if ref else None}
            reads = (v, v, "fp32", "fp32", *[v] * bool(ref))
            sizes: dict[str, Any] = {"TILES": 2, "SPLIT": 512, "BLOCK": NFT_BLOCK}
            yield _make_variant("nft_kernel", label, dtypes, reads=reads, warps=NFT_WARPS, max_registers=128, **sizes)
            yield _make_variant("nft_gradient_kernel", label, dtypes, reads=reads, writes=(v,), BLOCK=BLOCK)


def _noise_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK

    for x in ("fp32", "bf16"):
        for draws in (False, True):
            yield _make_variant(
                "flow_noise_kernel",
                f"{'seeds' if draws else 'noise'} x {x}",
                {"clean": x, "noisy": x, "seed": "i64" if draws else None},
                reads=(x,) if draws else (x, "fp32"),
                writes=("fp32", x) if draws else (x,),
                draws_noise=draws,
                BLOCK=BLOCK,
            )


def _row_variants() -> Iterator[KernelVariant]:
    """Yield variants of the row kernels for the linear layers of SD3 and Wan 14B, and for the longest row."""
    from wfm_kernels.ops import MAX_ROW
    from wfm_kernels.torch_backend import E4M3_MAX, MIN_SCALE
    from wfm_kernels.triton_backend import row_launch_shape

    for dtype, n in [("bf16", 1536), ("bf16", 5120), ("bf16", 13824), ("fp32", 1536), ("bf16", MAX_ROW)]:
        block, warps = row_launch_shape(n)
        yield _make_variant(
            "quantise_rows_kernel",
            f"x {dtype} of {n}",
            {"x": dtype, "byte": "u8"},
            reads=(dtype,),
            writes=("u8",),
            warps=warps,
            max_registers=128,
            MAX=E4M3_MAX,
            LEAST=MIN_SCALE,
            BLOCK=block,
        )


def _norm_variants() -> Iterator[KernelVariant]:
    """Yield variants for head sizes, for the widths of SD3 and Wan 14B, and for the longest row."""
    from wfm_kernels.norm_triton import launch_shape
    from wfm_kernels.norms import MAX_NORM_ROW

    for x, n in [("bf16", 64), ("bf16", 128), ("bf16", 5120), ("fp32", 1536), ("bf16", MAX_NORM_ROW)]:
        rows, block, warps = launch_shape(n)
        for weight, strided in [(x, False), (None, False), *([(x, True)] if rows > 1 else [])]:
            tensors = dict.fromkeys(("x", "out", "g", "dx"), x) | {"weight": weight}
            label = f"x {x} of {n}{'' if weight else ', no weight'}{', strided' if strided else ''}"
            sizes: dict[str, Any] = {"warps": warps, "max_registers": 128, "ROUND": True, "ROWS": rows, "BLOCK": block}
            if not strided:
                sizes |= {"d1": 1, "d2": 1}  # Triton specializes a kernel for arguments that are 1
            # A weight that several rows share is loaded in another layout, so its accesses cannot be counted.
            reads, writes = ((), ()) if weight and rows > 1 else ((x, *[x] * bool(weight)), (x,))
            yield _make_variant("rms_norm_kernel", label, tensors, reads=reads, writes=writes, **sizes)
            kernel, reads, frozen = "rms_norm_gradient_kernel", reads and (x, *reads), tensors | {"part": None}
            yield _make_variant(kernel, label, frozen, reads=reads, writes=writes, **sizes)
            if weight:
                yield _make_variant(kernel, f"{label}, sums", tensors, **sizes)
    for x, m, n in [
        ("bf16", "bf16", 1536),
        ("bf16", "fp32", 5120),
        ("fp32", "fp32", 1536),
        ("bf16", "bf16", MAX_NORM_ROW),
    ]:
        yield from _modulation_variants(x, m, n)


def _modulation_variants(x: str, m: str, n: int) -> Iterator[KernelVariant]:
    """Yield variants for tokens [B, tokens, n] of dtype x and a modulation of dtype m."""
    from wfm_kernels.norm_triton import GATE_BLOCK, GATE_WARPS, launch_shape

    _, block, warps = launch_shape(n)
    label = f"x {x} of {n}, {m}"
    tensors = dict.fromkeys(("x", "y", "out", "g", "dx", "dy"), x) | dict.fromkeys(("scale", "shift", "gate"), m)
    parts = ("dscale", "dgate", "part", "part_scale", "part_shift")
    frozen = tensors | dict.fromkeys(parts)
    norm: dict[str, Any] = {"warps": warps, "max_registers": 128, "BLOCK": block, "PLUS_ONE": True}
    kernel = "adaptive_norm_gradient_kernel"
    sums, writes = tensors | {"dscale": None}, (x, "fp32", "fp32")
    for center in (True, False) if x == m else (True,):
        norm["CENTER"], name = center, label if center else f"{label}, RMS"
        yield _make_variant("adaptive_norm_kernel", name, tensors, reads=(x, m, m), writes=(x,), **norm)
        yield _make_variant(kernel, name, frozen, reads=(x, x, m), writes=(x,), **norm)
        yield _make_variant(kernel, f"{name}, sums", sums, reads=(x, x, m), writes=writes, **norm)
    gate: dict[str, Any] = {"warps": GATE_WARPS, "BLOCK": GATE_BLOCK}
    yield _make_variant("gate_residual_kernel", label, tensors, reads=(x, x, m), writes=(x,), **gate)
    yield _make_variant("gate_residual_gradient_kernel", label, frozen, reads=(x, m), writes=(x,), **gate)


def _finish_variants() -> Iterator[KernelVariant]:
    floors: dict[str, dict[str, Any]] = {"sde_finish_kernel": {}, "nft_finish_kernel": {"MIN_WEIGHT": 1e-5}}
    for kernel, constants in floors.items():
        for split in (1, 512):
            yield _make_variant(
                kernel, f"of {split}", {"coef": "fp64"}, warps=1, max_registers=128, **constants, SPLIT=split
            )


def compile_variant(variant: KernelVariant) -> CompileReport:
    """Compile one variant and check it. The field `faults` of the report lists the problems."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = find_kernel(variant.kernel)
    known, names = variant.types | dict.fromkeys(variant.constants, "constexpr"), list(kernel.arg_names)
    assert known.keys() == set(names), f"{variant.kernel} has the arguments {names}"
    types = {name: known[name] for name in names}
    absent = {name: None for name, type_ in types.items() if type_ == "none"}
    # Triton specializes a kernel at launch for these properties: aligned pointers, n and strides as multiples of 16.
    aligned = [name for name, type_ in types.items() if type_.startswith("*") or name in {"n", *STRIDES}]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if type_ == "none" else type_ for name, type_ in types.items()},
        constexprs={(names.index(name),): value for name, value in (variant.constants | absent).items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": variant.warps, "enable_fp_fusion": False},
    )
    report = CompileReport(variant=variant)
    _read_ptx(compiled.asm["ptx"], report)
    _read_resources(compiled.asm["ptx"], report)
    report.layout = _sum_layout(compiled.asm["ttgir"])
    _check_report(report)
    return report


def _read_ptx(ptx: str, report: CompileReport) -> None:
    report.wide_reads = len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx))
    report.wide_writes = len(re.findall(r"st\.global[\w.:]*\.v4\.b32", ptx))
    report.fma = len(re.findall(r"fma\.r[nzmp][\w.]*\.f32", ptx))


def _read_resources(ptx: str, report: CompileReport) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        output = _assemble_ptx(source)
    report.registers = int(_match_number(r"Used (\d+) registers", output))
    report.stack_bytes = int(_match_number(r"(\d+) bytes stack frame", output))
    report.spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill", output)))


def _assemble_ptx(source: Path) -> str:
    """Return the output of the first bundled ptxas that accepts the PTX file. Raises RuntimeError if all reject it."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    messages = []
    for name in ("ptxas", "ptxas-blackwell"):  # newer PTX versions need the second one
        if (tools / name).exists():
            command = [str(tools / name), "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                return done.stdout + done.stderr
            messages.append(f"{name}: {(done.stdout + done.stderr).strip()}")
    raise RuntimeError(f"no ptxas in {tools} accepts the kernel: {'; '.join(messages)}")


def _match_number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in the output of ptxas: {text.strip()}")
    return match[1]


def _sum_layout(ttgir: str) -> str:
    """Return the thread layout of the first sum (tt.reduce) in TTGIR code, or "" if the code has no sum."""
    operand = re.search(r'"tt\.reduce"\([^)]*\).*?\}\)\s*:\s*\(tensor<[^,]*,\s*(#\w+)>', ttgir, re.DOTALL)
    if operand is None:
        return ""
    definition = re.search(rf"^{operand[1]} = (.*)$", ttgir, re.MULTILINE)
    return definition[1] if definition else operand[1]


def _check_report(report: CompileReport) -> None:
    variant = report.variant
    expected_fma = NUM_NOISE_FMA if variant.draws_noise else 0
    checks = {
        f"{report.spill_bytes} bytes of spills": report.spill_bytes == 0,
        f"{report.registers} registers, limit {variant.max_registers}": report.registers <= variant.max_registers,
        f"a stack of {report.stack_bytes} bytes": report.stack_bytes <= (32 if variant.draws_noise else 0),
        f"{report.fma} fused multiply-adds, expected {expected_fma}": report.fma == expected_fma,
    }
    report.faults += [fault for fault, is_ok in checks.items() if not is_ok]
    if variant.reads:
        _check_accesses(report)


def _check_accesses(report: CompileReport) -> None:
    reads, writes = (report.variant.wide_accesses(t) for t in (report.variant.reads, report.variant.writes))
    tiles = report.wide_reads // reads  # more than 1 if the compiler has unrolled the loop over tiles
    if report.wide_reads != tiles * reads or tiles == 0:
        report.faults.append(f"{report.wide_reads} loads of 16 bytes, expected {reads} per tile")
    if report.wide_writes != tiles * writes:
        report.faults.append(f"{report.wide_writes} stores of 16 bytes, expected {writes} per tile")


def compare_sum_layouts(reports: list[CompileReport]) -> None:
    """Check that the kernels for sampling and log-probability sum in the same order, for each dtype pair."""
    layouts: dict[str, str] = {}
    for report in reports:
        if report.variant.kernel == "sde_kernel":
            pair = report.variant.label.partition(" ")[2]
            if not report.layout or layouts.setdefault(pair, report.layout) != report.layout:
                report.faults.append(f"sums in the layout {report.layout!r}, expected {layouts.get(pair)!r}")


def format_table(reports: list[CompileReport]) -> str:
    rows = [f"{'kernel':28}{'variant':34}{'registers':>10}{'stack':>7}{'spills':>7}{'wide r/w':>10}{'fma':>6}"]
    for r in reports:
        rows.append(
            f"{r.variant.kernel:28}{r.variant.label:34}{r.registers:10}{r.stack_bytes:7}{r.spill_bytes:7}"
            f"{r.wide_reads:7}/{r.wide_writes:<2}{r.fma:6}{'  ' + '; '.join(r.faults) if r.faults else ''}"
        )
    return "\n".join(rows)


def main() -> int:
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("Triton is not installed: pip install triton\n")
        return 3
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.stderr.write("unset TRITON_INTERPRET: interpreted kernels cannot be compiled\n")
        return 3
    reports = [compile_variant(variant) for variant in kernel_variants()]
    compare_sum_layouts(reports)
    sys.stdout.write(format_table(reports) + "\n")
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())
