"""DDRL with `data_forward: separate`: gradients, metrics and samples are the same as with `joint`."""

import json
from unittest import mock

import pytest
import torch

from clips import write_clip
from forward_counts import counted, predicted
from multi_rank.resuming import records, tiny_recipe, train_on_rank

COMMON = [
    "run.steps=1",
    "logging.console=false",
    "validation.at_start=false",
    "validation.every=0",
    "engine.guard=true",
]
# Some micro-batches are not full, the KL needs reference predictions, and the data loss has a noticeable weight.
CUT = ["engine.micro_batch_size=3", "engine.max_forward_batch=4", "algorithm.kl_beta=0.1", "algorithm.data_beta=0.5"]
RELATIVE = 1e-6


def train_and_keep_gradients(recipe, overrides, kept, dropped):
    """Train, and save the gradient of the last optimizer step to the file `kept`. Samples in `dropped` do not train."""
    from dataclasses import replace

    from deepspeed.utils import safe_get_full_grad

    from wfm_ds.algorithms.ddrl import Ddrl
    from wfm_ds.engine.engine import DenoiserEngine

    step, advantages = DenoiserEngine.step, Ddrl.compute_advantages

    def keep(self):
        gradients = {
            name: safe_get_full_grad(parameter).clone()
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        if self.world.is_main:
            torch.save(gradients, kept)
        return step(self)

    def drop(self, rewards, groups):
        found = advantages(self, rewards, groups)
        return replace(found, values=[None if i in dropped else a for i, a in enumerate(found.values)])

    with mock.patch.object(DenoiserEngine, "step", keep), mock.patch.object(Ddrl, "compute_advantages", drop):
        return train_on_rank(recipe, overrides)


@pytest.fixture(scope="module")
def media(digits, tmp_path_factory):
    """Return {name: folder of captioned images or clips}."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "clips").mkdir()
    for i in range(4):
        write_clip(folder / "clips" / f"{i}.mp4", size=(64, 64))
        (folder / "clips" / f"{i}.json").write_text(json.dumps({"prompt": f"fade number {i}"}))
    return {"digits": digits, "clips": folder / "clips"}


@pytest.fixture
def compare(tiny_pipelines, media, tmp_path):
    """Return a function that trains one step with joint and with separate forwards, and compares both.

    Only the number of forwards may differ. The function returns both numbers of training forwards. exact: also assert
    that the counts of all forwards equal the prediction.
    """

    def run(ranks, *overrides, family="sd3", data="digits", exact=True, dropped=()):
        found = {}
        for how in ("joint", "separate"):
            folder, kept = tmp_path / how, tmp_path / f"{how}.pt"
            words = [*COMMON, *CUT, *overrides, f"algorithm.data_forward={how}"]
            recipe = tiny_recipe("sd3_ddrl", folder, tiny_pipelines(family), *words, data=media[data])
            ranks.run(train_and_keep_gradients, **recipe, kept=str(kept), dropped=list(dropped))
            if exact:
                assert counted(folder) == predicted(folder, ranks.num_ranks)
            found[how] = (torch.load(kept), records(folder))
        assert_same_gradient(found["joint"][0], found["separate"][0])
        return same_metrics(found["joint"][1], found["separate"][1], 8 - len(dropped))

    return run


def assert_same_gradient(joint, separate):
    expected, got = (torch.cat([of[name].double().flatten() for name in joint]) for of in (joint, separate))
    assert expected.norm() > 0
    assert (got - expected).norm() <= RELATIVE * expected.norm()


def same_metrics(joint, separate, num_samples):
    """Assert that both runs have equal metrics except perf/, and return their numbers of training forwards."""
    of_joint, of_separate = ([line for line in lines if "loss/total" in line][-1] for lines in (joint, separate))
    same = [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in (of_joint, of_separate)]
    assert same[1] == pytest.approx(same[0], rel=1e-5, abs=1e-7)
    assert of_joint["loss/data"] > 0
    assert of_joint["rollout/samples"] == num_samples
    return of_joint["perf/forwards_policy"], of_separate["perf/forwards_policy"]


def test_on_one_rank(one_rank, compare):
    """The rank has 8 samples with 3 trained denoising steps each."""
    assert compare(one_rank) == (8, 16)


@pytest.mark.parametrize("lora", ["null", "{rank: 4, alpha: 8}"])
@pytest.mark.parametrize("config", ["zero2", "zero3"])
@pytest.mark.ci_cases("zero2-{rank: 4, alpha: 8}")
def test_on_two_ranks(two_ranks, compare, config, lora):
    assert compare(two_ranks, f"engine.deepspeed={config}", f"lora={lora}") == (4, 8)


@pytest.mark.long
def test_data_at_the_first_trained_step_only(two_ranks, compare):
    """Each rank has 4 samples. Joint: 12 loss terms make 4 micro-batches. Separate: 8 terms without data make 3, and 4
    terms with data make 2, each with two forwards."""
    assert compare(two_ranks, "algorithm.data_on_first_only=true", "engine.deepspeed=zero3") == (4, 7)


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.long
def test_ranks_with_unequally_many_samples_to_train_on(two_ranks, compare, first_only):
    """The first rank trains on two of its four samples and pads with samples of weight 0."""
    settings = ["engine.deepspeed=zero3", f"algorithm.data_on_first_only={first_only}"]
    assert compare(two_ranks, *settings, dropped=[0, 1]) == ((4, 7) if first_only else (4, 8))


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.long
def test_two_experts(two_ranks, compare, first_only):
    trained = ["algorithm.train_on=[0, 1, 2, 3]", f"algorithm.data_on_first_only={first_only}"]
    size = ["sampling.height=32", "sampling.width=32", "sampling.num_frames=1", "data.max_upscale=8"]
    joint, separate = compare(two_ranks, *trained, *size, family="wan22", exact=False)
    assert joint < separate


@pytest.mark.parametrize("of_rollout", [True, False])
@pytest.mark.long
def test_videos_with_conditioning_frames_and_separate_noise(two_ranks, compare, of_rollout):
    size = ["sampling.height=32", "sampling.width=32", "sampling.num_frames=9", "model.guardrail=off"]
    settings = ["algorithm.max_num_conditional_frames=2", f"algorithm.use_rl_sigma_and_noise={of_rollout}"]
    assert compare(two_ranks, *size, *settings, family="cosmos25", data="clips") == (4, 8)
