"""A resumed run on a streaming dataset equals an uninterrupted run bit for bit."""

import pytest

from multi_rank.resuming import STEPS, assert_equal_runs, records, tiny_recipe, train_on_rank
from wfm_ds.demos.digits_data import write_digits

hf = pytest.importorskip("datasets")

NUM_ROWS = 40  # fewer than the 64 samples of the run


def test_a_resumed_streaming_run_equals_an_uninterrupted_run(two_ranks, tiny_pipelines, tmp_path):
    write_digits(tmp_path / "digits")
    files = sorted((tmp_path / "digits" / "images").glob("*.png"))
    features = hf.Features({"image": hf.Image(), "text": hf.Value("string")})
    (tmp_path / "set").mkdir()
    for number, part in enumerate([files[:25], files[25:NUM_ROWS]]):
        values = {
            "image": [{"bytes": b"" if i == 4 else file.read_bytes(), "path": None} for i, file in enumerate(part)],
            "text": ["" if i == 7 else f"digit {file.stem}" for i, file in enumerate(part)],
        }
        shard = hf.Dataset.from_dict(values, features=features)
        shard.to_parquet(tmp_path / "set" / f"train-{number:05}-of-00002.parquet", batch_size=8)
    changes = [
        "data.kind=hf",
        "data.streaming=true",
        "data.shuffle=false",
        "data.max_bad_fraction=0.4",
        f"validation.path={tmp_path / 'digits' / 'images'}",
        "validation.num_images=2",
        "validation.at_start=false",
        "validation.every=0",
        "logging.num_samples=1",
        f"run.steps={STEPS}",
        "logging.console=false",
        "lora={rank: 4, alpha: 8}",
    ]
    model = tiny_pipelines("sd3")
    whole, parts = (
        tiny_recipe("sd3_sft", tmp_path / name, model, *changes, data=tmp_path / "set") for name in ("whole", "parts")
    )
    two_ranks.run(train_on_rank, **whole)
    broken = [line for line in records(tmp_path / "whole") if "sft/loss" in line][-1]
    assert (broken["data/bad/no_prompt"], broken["data/bad/decode"]) == (3, 3)  # the first shard is read twice
    for result in two_ranks.run(train_on_rank, **parts, stop_at=2):
        assert (result["status"], result["step"]) == ("preempted", 2)
    for result in two_ranks.run(train_on_rank, **parts):
        assert (result["status"], result["step"]) == ("finished", STEPS)
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
