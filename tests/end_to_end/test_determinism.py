"""engine.deterministic applies in all processes that run the denoiser: the rank and its rollout worker."""

import pytest

from commands import ROOT, run_module

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
def test_deterministic_applies_to_the_rank_and_its_workers(tmp_path, tiny_pipelines, monkeypatch):
    (tmp_path / "my_family.py").write_text(FAMILY)
    (tmp_path / "seen").mkdir()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    words = ["run.output_dir=out", "run.steps=1", f"model.path={tiny_pipelines('sd3')}", "validation.num_prompts=1"]
    words += ["model.family=my_family:Watched", f"data.path={ROOT / 'recipes/prompts/colors'}"]
    words += ["engine.deterministic=true"]
    run_module("wfm_ds.train", ROOT / "tests" / "recipes" / "sd3_nft_async.yaml", *words, cwd=tmp_path)
    files = list((tmp_path / "seen").iterdir())
    assert len({file.stem for file in files}) == 2
    assert any(file.suffix == ".grad" for file in files)
    assert {file.read_text() for file in files} == {"[True, ':4096:8']"}
