"""engine.deterministic applies in all processes that run the denoiser: the rank and its rollout worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 240

FAMILY = """
import os
from pathlib import Path

import torch

from wfm_ds.models.sd3 import StableDiffusion3


class Watched(StableDiffusion3):
    def denoise(self, latents, sigma, conditioning, expert=None):
        kind = "grad" if torch.is_grad_enabled() else "sample"
        said = [torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")]
        Path("seen", f"{os.getpid()}.{kind}").write_text(str(said))
        return super().denoise(latents, sigma, conditioning, expert)
"""


@pytest.mark.slow
@pytest.mark.long
def test_deterministic_applies_to_the_rank_and_its_workers(tmp_path, tiny_pipelines):
    (tmp_path / "my_family.py").write_text(FAMILY)
    (tmp_path / "seen").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    words = ["run.output_dir=out", "run.steps=1", f"model.path={tiny_pipelines('sd3')}", "validation.num_prompts=1"]
    words += ["model.family=my_family:Watched", f"data.path={ROOT / 'recipes/prompts/colors'}"]
    words += ["engine.deterministic=true"]
    process = subprocess.run(
        [sys.executable, "-m", "wfm_ds.train", str(ROOT / "tests" / "recipes" / "sd3_nft_async.yaml"), *words],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'reward'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    files = list((tmp_path / "seen").iterdir())
    assert len({file.stem for file in files}) == 2
    assert any(file.suffix == ".grad" for file in files)
    assert {file.read_text() for file in files} == {"[True, ':4096:8']"}
