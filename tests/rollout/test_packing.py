"""Wire format: chunks of samples are sent and received unchanged."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from each_case import check_each
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.rollout.groups import Group, extract_rollout, plan_step_samples
from wfm_ds.rollout.histories import conditioning_tensor, replace_conditioning_frames
from wfm_ds.rollout.remote.packing import (
    ChunkTask,
    empty_rollout,
    pack_history,
    pack_trajectory,
    unpack_trajectory,
    validate_history,
    validate_trajectory,
)
from wfm_ds.sampling.denoise import Trajectory
from wfm_ds.sampling.edm import Churn, make_edm_plan
from wfm_ds.sampling.plan import deterministic_plan, stochastic_plan
from wfm_ds.transport import wire
from wfm_ds.types import FIRST_FRAME, Prompt

GRID = torch.linspace(1, 0, 7, dtype=torch.float64)
SHAPE = (2, 3, 4)
CPU = torch.device("cpu")


def a_trajectory(plan, count=3):
    noise = torch.randn((count, *SHAPE), generator=torch.Generator().manual_seed(0))
    return plan.denoise(lambda x, sigma: 0.3 * x + sigma, noise, list(range(count)))


def sent(arrays):
    """Return the arrays of a trajectory as received."""
    specs, frames = wire.pack_tensors(arrays)
    message = wire.Message("payload", 1, {}, tuple(specs), tuple(frames))
    return {spec.name: torch.from_numpy(array) for spec, array in zip(specs, message.read_tensors(), strict=True)}


def windowed(steps, **options):
    return stochastic_plan("flow_sde", GRID, noise_level=0.7, stored_steps=steps, **options)


@check_each(
    ("plan", "points"),
    [
        (windowed((1, 2, 3)), 4),  # consecutive steps share latents
        (windowed((0, 2, 3), keep_means=True), 5),
        (windowed((4,)), 2),
        (deterministic_plan("ode", GRID), 0),
    ],
)
def test_a_trajectory_arrives_bitwise_equal_without_a_copy(plan, points):
    made = a_trajectory(plan)
    layout, arrays = pack_trajectory(made)
    assert dict(arrays).get("points", np.empty((0, 0))).shape[1] == points
    found = unpack_trajectory(json.loads(json.dumps(layout)), sent(arrays))
    assert torch.equal(found.clean_latents, made.clean_latents)
    assert [s.index for s in found.stored_steps] == list(plan.stored_steps)
    for there, here in zip(found.stored_steps, made.stored_steps, strict=True):
        assert torch.equal(there.latents, here.latents)
        assert torch.equal(there.next_latents, here.next_latents)
        assert torch.equal(there.log_prob, here.log_prob)
        assert (there.mean is None) == (here.mean is None)
        assert here.mean is None or torch.equal(there.mean, here.mean)


def test_what_is_not_finite_becomes_zero():
    clean = torch.ones(2, *SHAPE)
    clean[1, 0] = torch.nan
    _, arrays = pack_trajectory(Trajectory(clean))
    assert dict(arrays)["clean"][1].min() == 0
    assert np.isfinite(dict(arrays)["clean"]).all()


@check_each(
    ("name", "change", "complaint"),
    [
        ("clean", lambda t: t[:2], r"clean: expected \[3, 2, 3, 4\] float32, got \[2, 2, 3, 4\] torch.float32"),
        ("points", lambda t: t[..., :3], r"latents: expected \[3, 2, 3, 4\] float32, got \[3, 2, 3, 3\]"),
        ("log_prob", lambda t: t[..., None], r"log_prob: expected \[3\] float32, got \[3, 1\] torch.float32"),
        ("log_prob", lambda t: t.double(), r"log_prob: expected \[3\] float32, got \[3\] torch.float64"),
        ("mean", lambda t: t.transpose(2, 3), r"mean: expected \[3, 2, 3, 4\] float32, got \[3, 3, 2, 4\]"),
        ("mean", None, "the means of the steps are missing"),
    ],
)
def test_arrays_that_a_plan_does_not_store_are_refused_by_name(name, change, complaint):
    plan = windowed((1, 2), keep_means=True)
    layout, arrays = pack_trajectory(a_trajectory(plan))
    good = sent(arrays)
    validate_trajectory(unpack_trajectory(layout, good), 3, plan, SHAPE)
    others = {key: tensor for key, tensor in good.items() if key != name}
    damaged = others if change is None else {**others, name: change(good[name])}
    with pytest.raises(ValueError, match=complaint):
        validate_trajectory(unpack_trajectory(layout, damaged), 3, plan, SHAPE)


def test_steps_and_means_must_be_those_of_the_plan():
    plan = windowed((1, 2), keep_means=True)
    made = a_trajectory(plan)
    with pytest.raises(ValueError, match=r"wrong stored steps: expected \[2, 3\], got \[1, 2\]"):
        validate_trajectory(made, 3, windowed((2, 3), keep_means=True), SHAPE)
    with pytest.raises(ValueError, match="the means of the steps are unexpected"):
        validate_trajectory(made, 3, windowed((1, 2)), SHAPE)
    validate_trajectory(a_trajectory(deterministic_plan("ode", GRID)), 3, deterministic_plan("ode", GRID), SHAPE)


def members():
    prompt = Prompt(id="p/1", text="a red square", negative_text="blue", metadata={"target": [1, 2]})
    return plan_step_samples([Group(prompt=prompt)], group_size=3, step=4, run_seed=1, same_noise=True)


def test_work_arrives_as_it_was_sent():
    work = ChunkTask(4, members())
    found = ChunkTask.from_rows(json.loads(json.dumps(work.to_rows())))
    assert work.to_arrays() == []
    assert found.step == 4
    assert list(found.samples) == list(work.samples)
    with pytest.raises(KeyError):
        ChunkTask.from_rows([{"step": 1}])


@check_each("count", [0, 1, 2])
def test_only_the_conditioning_frames_of_a_medium_are_sent(count):
    data = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    group = Group(prompt=Prompt(id="p", text="p"), data=data, num_conditioning_frames=count)
    work = ChunkTask(4, plan_step_samples([group], group_size=2, step=4, run_seed=1))
    [(_, array)] = work.to_arrays()
    assert array.shape == (2, count, 4, 5)
    arrived = sent([("frames", array)])["frames"].numpy()
    rows = json.loads(json.dumps(work.to_rows()))
    found = ChunkTask.from_rows(rows, [arrived]).samples[0].group
    assert found.num_conditioning_frames == count
    assert torch.equal(found.data[:, :count], data[:, :count])
    assert found.data.shape == data.shape
    assert not found.data[:, count:].any()
    for wrong in (data.numpy(), data[0].numpy(), array.astype(np.float16)):
        with pytest.raises(ValueError, match="invalid conditioning frames"):
            ChunkTask.from_rows(rows, [wrong])


@pytest.mark.parametrize("given", [False, True])
def test_inputs_travel_as_arrays_of_the_request(given):
    inputs = {"actions": np.float32([[0.1, -2], [3, 1e-7]]), "domain": np.array(4, np.float32)}
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    inputs |= {"source": pixels} if given else {"control": pixels[None]}
    data = torch.ones(2, 3, 4, 5) if given else None
    group = Group(prompt=Prompt(id="p", text="p", inputs=inputs), data=data, num_conditioning_frames=int(given))
    work = ChunkTask(4, plan_step_samples([group], group_size=2, step=4, run_seed=1))
    arrived = [tensor.numpy() for tensor in sent(work.to_arrays()).values()]
    rows = json.loads(json.dumps(work.to_rows()))
    found = ChunkTask.from_rows(rows, arrived).samples[1].group
    assert {name: array.tolist() for name, array in found.prompt.inputs.items()} == {
        name: array.tolist() for name, array in inputs.items()
    }
    assert (found.data is None, found.num_conditioning_frames) == (not given, int(given))
    images = [*arrived[:3], arrived[3].astype(np.float32)]
    for wrong in (arrived[:1], [*arrived[:2], arrived[2].astype(np.float16), arrived[3]], images):
        with pytest.raises(ValueError, match=r"arrays for 4 rows|input (domain must be float32|\w+ must be uint8)"):
            ChunkTask.from_rows(rows, wrong)


@pytest.mark.parametrize("pixels", [False, True])
def test_histories_travel_with_the_task_and_its_result(pixels):
    """A worker receives seeds and recorded frames, and returns the conditioning frames of the samples."""
    first = {FIRST_FRAME: np.full((4, 5, 3), 7, np.float32)} if pixels else {}
    data = None if pixels else torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    recording = np.arange(2 * 9 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 9, 4, 5, 3)
    prompt = Prompt(id="p", text="p", inputs={"actions": np.zeros((8, 2), np.float32), **first})
    count = int(not pixels)
    group = Group(
        prompt=prompt, data=data, num_conditioning_frames=count, history_seeds=(2**60, 5), recording=recording
    )
    work = ChunkTask(4, plan_step_samples([group], group_size=2, step=4, run_seed=1))
    arrived = [tensor.numpy() for tensor in sent(work.to_arrays()).values()]
    rows = json.loads(json.dumps(work.to_rows()))
    assert len(arrived) == len(rows)
    found = ChunkTask.from_rows(rows, arrived).samples[1].group
    assert (found.history_seeds, found.num_conditioning_frames) == ((2**60, 5), count)
    np.testing.assert_array_equal(found.recording, recording)
    for wrong in (arrived[-1].astype(np.int32), arrived[-1][0]):
        with pytest.raises(ValueError, match="invalid recording"):
            ChunkTask.from_rows(rows, [*arrived[:-1], wrong])

    assert pack_history(group) == []  # clip 0: the trainer has these frames
    moved = replace_conditioning_frames(group, conditioning_tensor(group) + 1)
    tensors = sent(pack_history(replace(moved, clip=2)))
    validate_history(tensors, group)
    received = replace_conditioning_frames(group, tensors["history"])
    assert torch.equal(conditioning_tensor(received), conditioning_tensor(group) + 1)
    assert pixels or torch.equal(received.data, pad_num_frames(data[:, :1] + 1, 3))
    with pytest.raises(ValueError, match=r"history: expected \[.*\] float32, got"):
        validate_history({"history": tensors["history"][:1]}, group)


CHURN = Churn(relative=0.1, min_level=0.05, max_level=100.0, noise_scale=1.0)


def test_states_arrive_at_the_stored_steps_of_the_plan():
    plan = make_edm_plan("edm_2ab", 5, CHURN, stored_steps=(1, 3))
    made = a_trajectory(plan)
    layout, arrays = pack_trajectory(made)
    found = unpack_trajectory(json.loads(json.dumps(layout)), sent(arrays))
    validate_trajectory(found, 3, plan, SHAPE)
    assert list(found.states) == [1, 3]
    assert all(torch.equal(found.states[k], made.states[k]) for k in (1, 3))
    with pytest.raises(ValueError, match=r"wrong stored steps: expected \[1, 2\], got \[1, 3\]"):
        validate_trajectory(found, 3, make_edm_plan("edm_2ab", 5, CHURN, stored_steps=(1, 2)), SHAPE)
    with pytest.raises(ValueError, match=r"wrong stored steps: expected \[1, 2\], got \[\]"):
        validate_trajectory(found, 3, windowed((1, 2)), SHAPE)
    empty = empty_rollout(members()[0], plan, SHAPE, CPU)
    assert {k: state.shape for k, state in empty.states.items()} == {1: SHAPE, 3: SHAPE}
    assert not empty.transitions


def test_an_empty_rollout_has_the_shapes_of_a_sample():
    plan = windowed((1, 2), keep_means=True)
    made = extract_rollout(members()[0], a_trajectory(plan), 0, replace_nonfinite=False)
    empty = empty_rollout(members()[0], plan, SHAPE, CPU)
    assert (empty.sample_id, empty.seed, empty.prompt) == (made.sample_id, made.seed, made.prompt)
    assert [t.index for t in empty.transitions] == [t.index for t in made.transitions]
    for there, here in zip(empty.transitions, made.transitions, strict=True):
        assert there.latents.shape == here.latents.shape
        assert there.mean.shape == here.mean.shape
        assert there.log_prob.shape == here.log_prob.shape
