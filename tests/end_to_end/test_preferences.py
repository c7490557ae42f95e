"""Offline DPO from the command line: train on a table of pairs and check the accuracy on held-out pairs."""

import json

import numpy as np
import pytest
from PIL import Image

from commands import run_module

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 60, 210), "yellow": (220, 210, 50)}


def write_pairs(folder, count, seed):
    """Write pairs of noisy squares. The chosen one has the prompt's colour, the rejected one another colour."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    lines = []
    for i in range(count):
        names = draw.permutation(list(COLOURS))[:2]
        for role, name in zip(("chosen", "rejected"), names, strict=True):
            pixels = np.array(COLOURS[name]) + draw.normal(0, 30, (16, 16, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}_{role}.png")
        files = {role: f"{i}_{role}.png" for role in ("chosen", "rejected")}
        lines.append(json.dumps({"prompt": f"a {names[0]} square", **files}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder / "pairs.jsonl"


@pytest.mark.slow
@pytest.mark.long
def test_dpo_learns_the_preferences(tmp_path, tiny_pipelines):
    trained, held_out = write_pairs(tmp_path / "train", 96, 0), write_pairs(tmp_path / "test", 24, 1)
    words = [
        f"run.output_dir={tmp_path / 'out'}",
        "run.steps=60",
        f"model.path={tiny_pipelines('sd3')}",
        f"data.path={trained}",
        f"validation.path={held_out}",
        "validation.every=0",
        "optimizer.lr=1e-2",
        "engine.micro_batch_size=8",
        "engine.gradient_accumulation=1",
        "sampling.eval_steps=1",
    ]
    run_module("wfm_ds.train", "tests/recipes/sd3_dpo.yaml", *words)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    assert accuracies[0] == 0.5  # before training, the policy equals the reference
    assert accuracies[-1] > 0.9, accuracies
    assert lines[-1]["val/loss"] < 0.4 < 0.69 < lines[0]["val/loss"]
