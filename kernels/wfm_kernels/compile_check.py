"""`python -m wfm_kernels.compile_check`: compile every kernel for sm_90 without a GPU and check the generated code.

The command reports register spills, memory accesses of less than 16 bytes, contracted multiply-adds, and different
summation orders in rollout and training. It does not check results or speed. The exit code is 1 if a check fails, 3 if
Triton is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1}
ACCESS_BYTES = 16
NUM_NOISE_FMA = 108  # in the logarithm, sine and cosine of the noise; Triton 3.6 to 3.9


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """A kernel with fixed dtypes and branches. types: type of each argument, in the order of the arguments."""

    kernel: str
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    reads: tuple[str, ...]  # dtypes of the latent-sized tensors
    writes: tuple[str, ...]
    warps: int
    max_registers: int
    draws_noise: bool = False

    def wide_accesses(self, dtypes: tuple[str, ...]) -> int:
        """Return how many 16-byte accesses a thread needs to read (or write) one tile of a tensor of each dtype."""
        per_thread = self.constants["BLOCK"] // (32 * self.warps)
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
    layout: str = ""  # layout of the tensor that is summed over a tile
    faults: list[str] = field(default_factory=list)


def kernel_variants() -> list[KernelVariant]:
    return [
        *_sde_variants(),
        *_gradient_variants(),
        *_nft_variants(),
        *_noise_variants(),
        *_row_variants(),
        *_finish_variants(),
    ]


def _sde_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK, WARPS

    pairs = [("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")]
    for velocity, latents in pairs:
        for uncond in (False, True) if (velocity, latents) in pairs[:2] else (False,):
            for mode in ("given", "noise", "seeds"):
                yield KernelVariant(
                    kernel="sde_kernel",
                    label=f"{mode} v {velocity} x {latents}{' guided' if uncond else ''}",
                    types={
                        "v_ptr": f"*{velocity}",
                        "u_ptr": f"*{velocity}" if uncond else "none",
                        "x_ptr": f"*{latents}",
                        "out_ptr": f"*{latents}",
                        "z_ptr": "*fp32" if mode == "noise" else "none",
                        "seed_ptr": "*i64" if mode == "seeds" else "none",
                        "mean_ptr": "none",
                        "coef_ptr": "*fp64",
                        "part_ptr": "*fp32",
                        "n": "i32",
                        "coef_stride": "i32",
                        "guidance": "fp32",
                    },
                    constants={"GIVEN": mode == "given", "TILES": 2, "SPLIT": 512, "BLOCK": BLOCK},
                    reads=(velocity, *[velocity] * uncond, latents)
                    + {"given": (latents,), "noise": ("fp32",), "seeds": ()}[mode],
                    writes=() if mode == "given" else (latents,),
                    warps=WARPS,
                    max_registers=80,
                    draws_noise=mode == "seeds",
                )


def _gradient_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK, WARPS

    for velocity, latents, uncond in [("bf16", "fp32", False), ("fp32", "fp32", False), ("bf16", "fp32", True)]:
        yield KernelVariant(
            kernel="sde_gradient_kernel",
            label=f"v {velocity} x {latents}{' guided' if uncond else ''}",
            types={
                "upstream_ptr": "*fp32",
                "v_ptr": f"*{velocity}",
                "u_ptr": f"*{velocity}" if uncond else "none",
                "x_ptr": f"*{latents}",
                "next_ptr": f"*{latents}",
                "coef_ptr": "*fp64",
                "dv_ptr": f"*{velocity}",
                "du_ptr": f"*{velocity}" if uncond else "none",
                "n": "i32",
                "coef_stride": "i32",
                "guidance": "fp32",
            },
            constants={"BLOCK": BLOCK},
            reads=(velocity, *[velocity] * uncond, latents, latents),
            writes=(velocity, *[velocity] * uncond),
            warps=WARPS,
            max_registers=80,
        )


def _nft_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK, NFT_BLOCK, NFT_WARPS, WARPS

    for velocity in ("bf16", "fp32"):
        for ref in (False, True):
            label = f"v {velocity}{' with ref' if ref else ''}"
            tensors = {
                "v_ptr": f"*{velocity}",
                "old_ptr": f"*{velocity}",
                "clean_ptr": "*fp32",
                "noise_ptr": "*fp32",
                "ref_ptr": f"*{velocity}" if ref else "none",
                "sigma_ptr": "*fp32",
            }
            reads = (velocity, velocity, "fp32", "fp32", *[velocity] * ref)
            yield KernelVariant(
                kernel="nft_kernel",
                label=label,
                types=tensors | {"part_ptr": "*fp32", "n": "i32", "beta": "fp32"},
                constants={"TILES": 2, "SPLIT": 512, "BLOCK": NFT_BLOCK},
                reads=reads,
                writes=(),
                warps=NFT_WARPS,
                max_registers=128,
            )
            upstream = {"upstream_ptr": "*fp32", "upstream_kl_ptr": "*fp32" if ref else "none"}
            rest = {"reward_ptr": "*fp32", "stats_ptr": "*fp32", "dv_ptr": f"*{velocity}", "batch": "i32", "n": "i32"}
            yield KernelVariant(
                kernel="nft_gradient_kernel",
                label=label,
                types=upstream | tensors | rest | {"beta": "fp32"},
                constants={"BLOCK": BLOCK},
                reads=reads,
                writes=(velocity,),
                warps=WARPS,
                max_registers=80,
            )


def _noise_variants() -> Iterator[KernelVariant]:
    from wfm_kernels.triton_backend import BLOCK, WARPS

    for clean in ("fp32", "bf16"):
        for draws in (False, True):
            yield KernelVariant(
                kernel="flow_noise_kernel",
                label=f"{'seeds' if draws else 'noise'} x {clean}",
                types={
                    "clean_ptr": f"*{clean}",
                    "sigma_ptr": "*fp32",
                    "seed_ptr": "*i64" if draws else "none",
                    "noise_ptr": "*fp32",
                    "noisy_ptr": f"*{clean}",
                    "n": "i32",
                },
                constants={"BLOCK": BLOCK},
                reads=(clean,) if draws else (clean, "fp32"),
                writes=("fp32", clean) if draws else (clean,),
                warps=WARPS,
                max_registers=80,
                draws_noise=draws,
            )


def _row_variants() -> Iterator[KernelVariant]:
    """Yield variants of the row kernels for the linear layers of SD3 and Wan 14B, and for the longest row."""
    from wfm_kernels.ops import MAX_ROW
    from wfm_kernels.torch_backend import E4M3_MAX, MIN_SCALE
    from wfm_kernels.triton_backend import row_launch_shape

    for dtype, n in [("bf16", 1536), ("bf16", 5120), ("bf16", 13824), ("fp32", 1536), ("bf16", MAX_ROW)]:
        block, warps = row_launch_shape(n)
        yield KernelVariant(
            kernel="quantise_rows_kernel",
            label=f"x {dtype} of {n}",
            types={"x_ptr": f"*{dtype}", "byte_ptr": "*u8", "scale_ptr": "*fp32", "n": "i32"},
            constants={"MAX": E4M3_MAX, "LEAST": MIN_SCALE, "BLOCK": block},
            reads=(dtype,),
            writes=("u8",),
            warps=warps,
            max_registers=128,
        )


def _finish_variants() -> Iterator[KernelVariant]:
    """Yield variants of the kernels that add partial sums. They read only a few hundred numbers per sample."""
    sums = {"n": "i32", "coef_stride": "i32"}
    arguments = {
        "sde_finish_kernel": {"part_ptr": "*fp32", "coef_ptr": "*fp64", "log_prob_ptr": "*fp32"} | sums,
        "nft_finish_kernel": dict.fromkeys(("part_ptr", "reward_ptr", "policy_ptr", "kl_ptr", "stats_ptr"), "*fp32")
        | {"batch": "i32", "n": "i32", "beta": "fp32"},
    }
    for kernel, types in arguments.items():
        for split in (1, 512):
            floor = {"MIN_WEIGHT": 1e-5} if kernel == "nft_finish_kernel" else {}
            yield KernelVariant(
                kernel=kernel,
                label=f"of {split}",
                types=types,
                constants=floor | {"SPLIT": split},
                reads=(),
                writes=(),
                warps=1,
                max_registers=128,
            )


def compile_variant(variant: KernelVariant) -> CompileReport:
    """Compile one variant and check it. Problems are listed in `faults`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from wfm_kernels import triton_kernels

    kernel = getattr(triton_kernels, variant.kernel)
    types = variant.types | dict.fromkeys(variant.constants, "constexpr")
    names = list(types)
    assert names == list(kernel.arg_names), f"{variant.kernel} has the arguments {kernel.arg_names}"
    absent = {name: None for name, type_ in types.items() if type_ == "none"}
    # As specialized at launch: aligned pointers, n a multiple of 16.
    aligned = [name for name, type_ in types.items() if type_.startswith("*") or name == "n"]
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
    """Return the output of the first bundled ptxas program that accepts the PTX file.

    Raises RuntimeError if none accepts it.
    """
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
    """Return the thread layout of the first sum (tt.reduce) in TTGIR code.

    Returns "" if the code has no sum.
    """
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
        f"{report.fma} contracted multiply-adds, expected {expected_fma}": report.fma == expected_fma,
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
    """Check that the sampling and log-probability kernels sum in the same order (layout), for each dtype pair."""
    layouts: dict[str, str] = {}
    for report in reports:
        if report.variant.kernel == "sde_kernel":
            pair = report.variant.label.partition(" ")[2]
            if not report.layout or layouts.setdefault(pair, report.layout) != report.layout:
                report.faults.append(f"sums in the layout {report.layout!r}, expected {layouts.get(pair)!r}")


def format_table(reports: list[CompileReport]) -> str:
    rows = [f"{'kernel':22}{'variant':34}{'registers':>10}{'stack':>7}{'spills':>7}{'wide r/w':>10}{'fma':>6}"]
    for r in reports:
        rows.append(
            f"{r.variant.kernel:22}{r.variant.label:34}{r.registers:10}{r.stack_bytes:7}{r.spill_bytes:7}"
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
