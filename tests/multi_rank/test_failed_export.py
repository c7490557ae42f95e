"""If the export fails, the run still saves a checkpoint of the last step and can resume from it."""

import shutil

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank
from wfm_ds.errors import UserError


def train_while_the_base_disappears(recipe, overrides, index):
    """Train, and delete the base model's model_index.json in the first step. Exports need this file."""
    from pathlib import Path

    from wfm_ds.training.rl import RlLoop

    train_step = RlLoop.train_step

    def delete_and_train(self, step):
        Path(index).unlink(missing_ok=True)
        return train_step(self, step)

    RlLoop.train_step = delete_and_train
    try:
        train_on_rank(recipe, overrides)
    except UserError as error:
        return str(error)
    finally:
        RlLoop.train_step = train_step


@pytest.mark.parametrize("export_every", [0, 1])
def test_a_checkpoint_is_saved_before_the_error_of_an_export(one_rank, tiny_pipelines, tmp_path, export_every):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_pipelines("sd3"), model)
    index = (model / "model_index.json").read_text()
    overrides = ["lora=null", "engine.deepspeed=zero1", "run.steps=1", "validation.every=0"]
    checkpoints = ["checkpoint.every=0", f"checkpoint.export_every={export_every}"]
    run = tiny_recipe("sd3_nft", out, model, *overrides, *checkpoints)
    (message,) = one_rank.run(train_while_the_base_disappears, **run, index=str(model / "model_index.json"))
    assert "model_index.json" in message
    assert (out / "checkpoints" / "step_1" / "COMPLETE").exists()
    (model / "model_index.json").write_text(index)
    (outcome,) = one_rank.run(train_on_rank, **run)
    assert (outcome["status"], outcome["step"]) == ("finished", 1)
    assert (out / "safetensors" / "step_1" / "transformer" / "config.json").exists()


def train_with_a_failing_export(recipe, overrides):
    """Train on this rank. Rank 0 fails when it writes the export, with an error that wfm_ds does not raise itself."""
    from wfm_ds.export import weights

    def fail(*args, **kwargs):
        raise MemoryError("no more")

    write_lora, weights.write_lora = weights.write_lora, fail
    try:
        train_on_rank(recipe, overrides)
    except UserError as error:
        return str(error)
    finally:
        weights.write_lora = write_lora


def test_a_checkpoint_is_saved_before_an_unexpected_error_of_an_export(two_ranks, tiny_pipelines, tmp_path):
    out = tmp_path / "out"
    overrides = ["run.steps=1", "validation.every=0", "checkpoint.every=0", "checkpoint.export_every=1"]
    run = tiny_recipe("sd3_nft", out, tiny_pipelines("sd3"), *overrides)
    messages = two_ranks.run(train_with_a_failing_export, **run)
    assert messages == [f"the weights cannot be exported to {out}/safetensors/step_1: MemoryError: no more"] * 2
    assert (out / "checkpoints" / "step_1" / "COMPLETE").exists()
    outcomes = two_ranks.run(train_on_rank, **run)
    assert [(o["status"], o["step"]) for o in outcomes] == [("finished", 1)] * 2
