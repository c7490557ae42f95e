"""Measure how much each model.base_precision changes a prediction: `python -m benchmarks.precision`.

Every tiny family (random weights) predicts velocities in bfloat16, and then with its base in fewer bits. The result is
the norm of the difference relative to the norm of the bfloat16 prediction. For comparison, bfloat16 is compared with
float32. On a CPU, float8 products are emulated. Writes results/<date>-cpu-precision.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel
from wfm_ds.program import run_command
from wfm_ds.recipe.sections import BasePrecision
from wfm_ds.types import FIRST_FRAME

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

SIZES: Mapping[str, tuple[int, int, int]] = {  # height, width, frames
    "sd3": (64, 64, 1),
    "sana": (64, 64, 1),
    "sana_video": (64, 64, 5),
    "cosmos25": (64, 64, 9),
    "wan21": (64, 64, 5),
    "wan22": (64, 64, 5),
    "wan22_ti2v": (64, 64, 9),
    "wan21_i2v": (64, 64, 5),
    "wan22_i2v": (64, 64, 5),
    "digits": (8, 8, 1),
    "moving": (32, 32, 5),
    "flux2": (64, 64, 1),
    "flux2_dev": (64, 64, 1),
    "qwen_image": (64, 64, 1),
    "z_image": (64, 64, 1),
    "cosmos3": (64, 64, 9),
    "world": (8, 16, 5),
    "sana_wm": (64, 64, 5),
}
SIGMAS = (0.98, 0.95, 0.92, 0.9)  # all noise levels of the first expert of wan22
PROMPTS = ["a red circle", "the digit 7", "", "a dog"]
SAME: BasePrecision = "fp8_twice"  # same forward pass as fp8


def available_precisions() -> list[BasePrecision]:
    """Return the values of base_precision that this machine can compute: nf4 needs a package."""
    here = [p for p in get_args(BasePrecision) if p != SAME]
    return [p for p in here if p != "nf4" or find_spec("bitsandbytes")]


def family_row(family: str) -> dict[str, Any]:
    """Compare each precision with bfloat16, and bfloat16 with float32, in percent of the prediction's norm."""
    plain = predict_velocities(load_tiny_family(family, torch.bfloat16), family)
    exact = predict_velocities(load_tiny_family(family, torch.float32), family)
    cells: dict[str, Any] = {"tiny family": family, "bfloat16 from float32, %": percent_difference(plain, exact)}
    for precision in available_precisions():
        model = load_tiny_family(family, torch.bfloat16)
        quantise_base(model.unwrapped_denoiser, model.block_classes, precision, model.dtype, torch.device("cpu"))
        cells[f"{precision} from bfloat16, %"] = percent_difference(predict_velocities(model, family), plain)
    return cells


def load_tiny_family(family: str, dtype: torch.dtype) -> DiffusionModel:
    has_guardrail = registry.find_family(registry.resolve_pipeline(f"tiny:{family}")).has_guardrail
    return registry.load_model(
        f"tiny:{family}", dtype=dtype, device="cpu", guardrail="off" if has_guardrail else "stock"
    )


@torch.no_grad()
def predict_velocities(model: DiffusionModel, family: str) -> Tensor:
    """Return predictions [B, ...] in float32. The latents do not depend on the dtype of the model."""
    shape = model.latent_shape(*SIZES[family])
    latents = torch.randn(len(SIGMAS), *shape, generator=torch.Generator().manual_seed(0))
    return model.denoise(
        latents, torch.tensor(SIGMAS), model.encode_text(PROMPTS) | encode_extra_inputs(model, family)
    ).float()


def encode_extra_inputs(model: DiffusionModel, family: str) -> Conditioning:
    """Return the conditioning that some families need in addition to a text: gray first frames."""
    if model.uses_clean_frames:
        return {}
    height, width, frames = SIZES[family]
    levels = [np.full((height, width, 3), 50.0 * k, np.float32) for k in range(len(PROMPTS))]
    return model.encode_inputs([{FIRST_FRAME: frame} for frame in levels], frames, (height, width))


def percent_difference(found: Tensor, wanted: Tensor) -> float:
    return 100 * float((found.double() - wanted.double()).norm() / wanted.double().norm())


def run_study(args: argparse.Namespace) -> None:
    rows = [family_row(family) for family in args.families]
    path = report.write_results("precision", report.describe_machine(), rows)
    sys.stdout.write(f"{report.format_table(rows)}\n\n{path}\n")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.precision", description=__doc__.split("\n")[0])
    p.add_argument("--families", nargs="+", choices=SIZES, default=list(SIZES))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_study, argv)


if __name__ == "__main__":
    sys.exit(main())
