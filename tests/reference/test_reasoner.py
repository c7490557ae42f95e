"""Full vision-language runs compared with plain transformers: losses, gradient norms, weights and validation."""

import json

import pytest

from multi_rank.resuming import ROOT
from reference.comparison import assert_same_run
from reference.networks import as_overrides
from reference.product import read_validation, train_and_keep
from reference.reasoner import Reasoner
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.models import registry

OPTIONS = {
    **{"run.steps": 4, "run.seed": 7, "optimizer.lr": 3e-3, "optimizer.eps": 1e-3, "optimizer.weight_decay": 0.05},
    **{"optimizer.warmup_steps": 2, "optimizer.schedule": "cosine", "optimizer.final_lr_fraction": 0.2},
    **{"ema": {"decay": 0.3}, "engine.max_grad_norm": 4.0, "engine.micro_batch_size": 2},
    **{
        "engine.gradient_accumulation": 2,
        "data.max_tokens": 96,
        "validation.num_images": 16,
        "validation.every": 0,
        "validation.at_start": False,
    },
    **{"logging.console": False},
}


def test_vision_language_sft_is_plain_transformers(one_rank, tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    write_squares(data)
    rows = json.loads((data / "annotations.json").read_text())
    for row in rows[1::3]:
        del row["image"]
        row["conversations"] = [{"from": "human", "value": "a cat is"}, {"from": "gpt", "value": "a cat moving left"}]
    train, held_out = rows[:24], rows[24:]
    for name, part in (("train", train), ("held_out", held_out)):
        (data / f"{name}.json").write_text(json.dumps(part))
    reference = Reasoner(registry.get_tiny_folder("qwen25vl"), train, data, OPTIONS)
    places = {"data.path": data / "train.json", "validation.path": data / "held_out.json", "data.media_path": data}
    words = [*(f"{name}={path}" for name, path in places.items()), *as_overrides(OPTIONS)]
    words += [f"run.output_dir={out}", "model.path=tiny:qwen25vl", "validation.holdout=0"]
    one_rank.run(train_and_keep, recipe=str(ROOT / "tests" / "recipes" / "reason_llava_sft.yaml"), overrides=words)
    expected = reference.train()
    assert max(len(sequence) for step in reference.batches for sequence in step) > 1
    assert {line["optim/clipped"] for line in expected} == {0.0, 1.0}
    assert_same_run(out, reference, reference.optimization, expected, ("train", "ema"))
    (validated,) = read_validation(out)
    assert {name: validated[name] for name in ("val/loss", "val/token_accuracy")} == pytest.approx(
        reference.validate(held_out, data), rel=1e-5
    )
