"""If the export fails, the run still saves a checkpoint of the last step and can resume from it."""

import re
import shutil
from unittest import mock

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank
from ranks import attempt, started
from wfm_ds.errors import GatherError, RunError, UserError


def train_while_the_base_disappears(recipe, overrides, index):
    """Train, and delete the base model's model_index.json in the first step. Exports need this file."""
    from pathlib import Path

    from wfm_ds.training.rl import RlLoop

    train_step = RlLoop.train_step

    def delete_and_train(self, step):
        Path(index).unlink(missing_ok=True)
        return train_step(self, step)

    with mock.patch.object(RlLoop, "train_step", delete_and_train):
        return attempt(lambda: train_on_rank(recipe, overrides), UserError)


@pytest.mark.parametrize("export_every", [0, 1])
@pytest.mark.long
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


def train_with_a_failing_export(recipe, overrides, where):
    """Train on this rank. Exports fail with errors that wfm_ds does not raise itself. Return the error.

    where: `write`: when rank 0 writes the files. `gather`: when rank 1 gathers a tensor with the other ranks.
    """
    import torch.distributed as dist

    from wfm_ds.engine.shards import Shards
    from wfm_ds.export import weights

    def fail(*args, **kwargs):
        raise ArithmeticError("unexpected")

    write_lora, gather = weights.write_lora, Shards.gather_parameter
    if where == "write":
        weights.write_lora = fail
    elif dist.get_rank() == 1:
        Shards.gather_parameter = fail
    try:
        train_on_rank(recipe, overrides)
    except (GatherError, RunError) as error:
        if where == "gather":
            dist.destroy_process_group()  # as the end of the process does; rank 0 waits for this rank
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:  # rank 0 lost rank 1
        return f"{type(error).__name__}: {error}"
    finally:
        weights.write_lora, Shards.gather_parameter = write_lora, gather


EXPORTING = ["run.steps=1", "validation.every=0", "checkpoint.every=0", "checkpoint.export_every=1"]


def test_a_checkpoint_is_saved_before_an_unexpected_error_of_an_export(two_ranks, tiny_pipelines, tmp_path):
    out = tmp_path / "out"
    run = tiny_recipe("sd3_nft", out, tiny_pipelines("sd3"), *EXPORTING)
    messages = two_ranks.run(train_with_a_failing_export, **run, where="write")
    expected = f"RunError: the weights cannot be exported to {out}/safetensors/step_1: ArithmeticError: unexpected"
    assert messages == [expected] * 2
    assert (out / "checkpoints" / "step_1" / "COMPLETE").exists()
    outcomes = two_ranks.run(train_on_rank, **run)
    assert [(o["status"], o["step"]) for o in outcomes] == [("finished", 1)] * 2


def test_a_rank_that_cannot_gather_a_tensor_leaves_the_run_at_once(tiny_pipelines, tmp_path):
    run = tiny_recipe("sd3_nft", tmp_path / "out", tiny_pipelines("sd3"), *EXPORTING)
    with started(2, tmp_path) as new_ranks:  # whose process group this test destroys
        messages = new_ranks.run(train_with_a_failing_export, **run, where="gather")
    assert re.fullmatch(r"GatherError: gathering \S+: ArithmeticError: unexpected", messages[1])
    assert "RunError" not in messages[0]  # rank 0 did not wait for an agreement
