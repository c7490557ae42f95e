"""Name of a rollout worker, which identifies it to the broker, and its base weights, which must equal the trainer's."""

import pytest
import torch

from wfm_ds.engine.fp8_linear import Fp8Linear
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.remote import worker
from wfm_ds.rollout.remote.generator import ChunkGenerator
from wfm_ds.rollout.remote.identity import compute_identity
from wfm_ds.rollout.remote.worker import MAX_NAME_CHARS, build_generator, default_worker_name, parser
from wfm_ds.transport import wire

NEEDED = ["recipe.yaml", "--connect", "pipes.json"]


@pytest.fixture
def asked(root):
    def load(*overrides):
        return recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft_async.yaml", list(overrides))

    return load


def of_trainer(recipe):
    return compute_identity(recipe, registry.load_model("tiny:sd3", dtype=torch.bfloat16, device="cpu"))


@pytest.mark.parametrize(
    ("trainer", "here", "named"),
    [
        (["model.base_precision=fp8"], [], r"model, rollout\.base_precision differ"),
        ([], ["rollout.base_precision=fp8"], r"worker's rollout\.base_precision differ"),
        (["rollout.base_precision=fp8"], [], r"worker's rollout\.base_precision differ"),
    ],
)
def test_a_worker_with_another_base_than_the_trainer_expects_is_refused(trainer, here, named, asked):
    with pytest.raises(RecipeError, match=named):
        build_generator(asked(*here), "cpu", None, of_trainer(asked(*trainer)))


def test_a_worker_keeps_the_base_as_the_recipe_says(asked):
    recipe = asked("rollout.base_precision=fp8", "run.output_dir=unused")
    generator = build_generator(recipe, "cpu", None, of_trainer(recipe))
    assert isinstance(generator, ChunkGenerator)
    denoiser = generator.sampler.model.denoiser
    assert [part for part in denoiser.modules() if isinstance(part, Fp8Linear)]
    assert {parameter.dtype for parameter in denoiser.parameters()} == {generator.sampler.model.dtype}


def test_processes_of_equal_host_and_pid_have_different_names(monkeypatch):
    monkeypatch.setattr(worker.socket, "gethostname", lambda: "h" * 64)
    monkeypatch.setattr(worker.os, "getpid", lambda: 4194304)
    assert default_worker_name() != default_worker_name()
    assert len(default_worker_name()) <= MAX_NAME_CHARS


def test_a_name_that_no_message_can_carry_is_refused(capsys):
    longest = "n" * MAX_NAME_CHARS
    lane = f"{parser().parse_args([*NEEDED, '--name', longest]).name}/15"
    hello = {"worker": lane, "life": "1", "name": lane, "kinds": ["denoise"], "credit": 1, "held": []}
    assert wire.decode_message([wire.encode_header("hello", 1, hello)], frozenset({"hello"})).fields["worker"] == lane
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args([*NEEDED, "--name", longest + "n"])
    assert f"the name must have 1 to {MAX_NAME_CHARS} characters" in capsys.readouterr().err
