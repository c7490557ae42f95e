"""A rank or a rollout worker runs out of memory in a real run, by allocating more than the address space."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wfm_ds.demos.digits_data import write_digits

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300
FAMILY = """
import os

import torch

from wfm_ds.models.sd3 import StableDiffusion3

FORWARDS = 2 * 2  # with gradient, of two steps


class Hungry(StableDiffusion3):
    num_forwards = 0

    def denoise(self, latents, sigma, conditioning, expert=None):
        self.num_forwards += torch.is_grad_enabled()
        rank = os.environ.get("RANK", "worker")
        if os.environ.get("HUNGRY") == rank and (rank == "worker" or self.num_forwards > FORWARDS):
            torch.empty(2**50, dtype=torch.uint8)
        return super().denoise(latents, sigma, conditioning, expert)
"""


def train(folder, pipeline, *words, num_ranks=2, recipe="sd3_sft", **environ):
    (folder / "hungry.py").write_text(FAMILY)
    command = [sys.executable, "-m", "wfm_ds.launch", "--num_gpus", str(num_ranks), "-m", "wfm_ds.train"]
    family = [f"model.path={pipeline}", "model.family=hungry:Hungry"]
    words = ["run.output_dir=out", "run.steps=4", "validation.at_start=false", "validation.every=0", *family, *words]
    return subprocess.run(
        [*command, str(ROOT / "tests" / "recipes" / f"{recipe}.yaml"), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'kernels'}:{ROOT / 'reward'}", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.long
def test_out_of_memory_ends_all_ranks_and_the_run_resumes_with_a_lower_key(tmp_path, tiny_pipelines):
    write_digits(tmp_path / "digits")
    words = [f"data.path={tmp_path / 'digits' / 'images'}", "checkpoint.every=1"]
    process = train(tmp_path, tiny_pipelines("sd3"), *words, HUNGRY="1")
    assert process.returncode == 2, process.stdout + process.stderr
    said = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, process.stdout + process.stderr
    assert said[0].startswith("error: out of memory on cpu in phase train: requested 1048576.0 GiB more, ")
    assert "; change model.gradient_checkpointing: true, or engine.micro_batch_size below 4, or " in said[0]
    assert "Traceback" not in process.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["status"], result["step"]) == ("failed", 3)
    assert "rank 1 (" in result["message"]
    assert "out of memory on cpu" in result["message"]
    lowered = ["engine.micro_batch_size=2", "engine.gradient_accumulation=4", "model.gradient_checkpointing=true"]
    process = train(tmp_path, tiny_pipelines("sd3"), *words, *lowered)
    assert process.returncode == 0, process.stdout + process.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4]


def test_the_run_reports_the_out_of_memory_error_of_a_worker(tmp_path, tiny_pipelines):
    prompts = f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}"
    process = train(tmp_path, tiny_pipelines("sd3"), prompts, num_ranks=1, recipe="sd3_nft_async", HUNGRY="worker")
    assert process.returncode != 0
    said = "out of memory on cpu in phase rollout: requested 1048576.0 GiB more, "
    log = (tmp_path / "out" / "rollout" / "spawned-0.log").read_text()
    assert log.splitlines()[-1].startswith(f"error: {said}")
    assert "; change engine.max_forward_batch below 16" in log.splitlines()[-1]
    assert f"rollout worker spawned-0 failed: {said}" in process.stdout + process.stderr
    assert f"spawned-0 failed: {said}" in json.loads((tmp_path / "out" / "result.json").read_text())["message"]
