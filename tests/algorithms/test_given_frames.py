"""Conditioning frames in every RL algorithm: rollouts and losses equal a float64 computation on the other frames alone.

The conditioning frames of other samples in the batch have no effect.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.errors import RecipeError
from wfm_ds.models.conditioning_frames import add_clean_frames, get_clean_frames
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.groups import extract_transitions
from wfm_ds.types import ConditioningFrames

RECIPE = Path(__file__).parent.parent / "recipes" / "cosmos25_i2v_nft.yaml"
GRID = torch.tensor([1, 0.9, 0.7, 0.4, 0], dtype=torch.float64)
SHAPE = (2, 4, 3, 2)  # C, T, h, w
COUNTS = [1, 0, 3]
ADVANTAGES = [0.7, -1.3, 2.0]
CASES = {
    "nft": {"name": "diffusion_nft", "kl_beta": 0.1},
    "flow_grpo": {"name": "flow_grpo", "kl_beta": 0.1, "clip_ratio": 0.5},
    "guard": {"name": "flow_grpo", "guard": True, "old_log_prob": "rollout", "kl_beta": 0.1, "kl_type": "flow_grpo"},
    "divergence": {"name": "flow_grpo", "trust_region": "divergence", "old_log_prob": "rollout", "divergence": 0.5},
    "awm": {"name": "awm", "kl_beta": 0.1, "clip_ratio": 0.5},
    "ram": {"name": "ram"},
    "dgpo": {"name": "dgpo"},
}


def algorithm(**keys):
    solver = "flow_sde" if keys["name"] == "flow_grpo" else "ode"
    recipe = rl_recipe(
        {"max_num_conditional_frames": 3, **keys},
        model={"path": "tiny:cosmos25"},
        data={"kind": "paired"},
        sampling={"num_frames": 13, "steps": 4, "solver": solver},
        rollout={"group_size": 3},
    )
    model = {"flow_shift": lambda sampling: 1.0, "family": "f", "sigma_ranges": [(0.0, 1.0)]}
    return build_rl_algorithm(
        recipe, GRID, SimpleNamespace(**model, clean_frame_range=tuple, stream_sizes=lambda sampling: {})
    )


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rolled_out(rl):
    """Return rollouts of a denoiser with conditioning frames, and their trajectory."""
    data = drawn(3, *SHAPE, seed=1)
    given = ConditioningFrames(data, torch.tensor(COUNTS))
    frames = get_clean_frames(add_clean_frames({}, given.latents, given.counts))

    def predict(latents, sigma):
        return frames.insert_known_velocity(
            0.3 * frames.insert_clean_latents(latents) + sigma, latents, torch.full((3,), sigma)
        )

    trajectory = rl.plan(1).denoise(predict, drawn(3, *SHAPE, seed=2), [5, 6, 7], given)
    samples = [
        make_rollout(
            i,
            trajectory.clean_latents[i],
            seed=5 + i,
            transitions=extract_transitions(trajectory, i, replace_nonfinite=False),
            data_latents=data[i],
            num_conditioning_frames=count,
        )
        for i, count in enumerate(COUNTS)
    ]
    return samples, trajectory


def alone(batch, row, count):
    """Return the free frames of one term in float64, as a batch of a run without conditioning frames."""

    def part(value):
        if not isinstance(value, torch.Tensor):
            return value
        value = value[row : row + 1]
        value = value.double() if value.is_floating_point() else value
        return value[:, :, count:] if value.ndim == 5 else value

    fields = {field.name: part(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    return dataclasses.replace(
        batch, **{**fields, "prompts": batch.prompts[row : row + 1], "conditioning_frames": None}
    )


@check_each("case", CASES)
def test_loss_and_gradient_are_those_of_the_other_frames(case):
    rl = algorithm(**CASES[case])
    samples, _ = rolled_out(rl)
    [terms] = rl.updates(on_one_rank(samples), ADVANTAGES, step=1)
    terms = [
        dataclasses.replace(term, is_first_update=False) if hasattr(term, "is_first_update") else term for term in terms
    ]
    batch = rl.assemble(terms, samples, torch.device("cpu"))
    if rl.uses_group_statistics:
        batch = dataclasses.replace(batch, group_statistics=drawn(len(terms), seed=9))
    assert batch.conditioning_frames.counts.tolist() == [COUNTS[term.row] for term in terms]
    velocity = drawn(*batch.latents.shape, seed=3).requires_grad_()
    references = {policy: velocity.detach() + 0.1 * drawn(*velocity.shape, seed=4) for policy in rl.references}
    loss, stats = rl.loss(velocity, batch, references)
    loss.sum().backward()
    if rl.uses_group_statistics:
        _, contributions = rl.group_statistics(terms, velocity.detach(), batch, references)
    for row, term in enumerate(terms):
        count = COUNTS[term.row]
        assert velocity.grad[row, :, :count].abs().sum() == 0
        own = velocity.detach()[row : row + 1, :, count:].double().requires_grad_()
        others = {policy: v[row : row + 1, :, count:].double() for policy, v in references.items()}
        wanted, figures = rl.loss(own, alone(batch, row, count), others)
        wanted.sum().backward()
        torch.testing.assert_close(loss[row].detach().double(), wanted[0].detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(velocity.grad[row, :, count:].double(), own.grad[0], rtol=1e-4, atol=1e-6)
        for tag, value in figures.items():
            if not isinstance(value, tuple):
                torch.testing.assert_close(stats[tag][row].double(), value[0].double(), rtol=1e-4, atol=1e-6, msg=tag)
        if rl.uses_group_statistics:
            _, expected = rl.group_statistics([term], own.detach(), alone(batch, row, count), others)
            torch.testing.assert_close(contributions[row].double(), expected[0], rtol=1e-4, atol=1e-5)


def test_conditioning_frames_do_not_change_and_are_excluded_from_log_probs():
    rl = algorithm(**CASES["flow_grpo"])
    samples, trajectory = rolled_out(rl)
    for i, (sample, count) in enumerate(zip(samples, COUNTS, strict=True)):
        assert torch.equal(sample.clean_latents[:, :count], sample.data_latents[:, :count])
        for stored in trajectory.stored_steps:
            assert torch.equal(stored.latents[i, :, :count], sample.data_latents[:, :count])
            assert torch.equal(stored.next_latents[i, :, :count], sample.data_latents[:, :count])
    [terms] = rl.updates(on_one_rank(samples), ADVANTAGES, step=1)
    batch = rl.assemble(terms, samples, torch.device("cpu"))
    # equals the rollout's velocity on the free frames
    velocity = 0.3 * batch.latents + batch.sigma.view(-1, 1, 1, 1, 1)
    _, stats = rl.loss(velocity, batch, {"ref": velocity})
    torch.testing.assert_close(stats["policy/log_prob_mean"], batch.rollout_log_prob, rtol=0, atol=0)
    for row, term in enumerate(terms):
        one = alone(batch, row, COUNTS[term.row])
        _, wanted = rl.loss(velocity[row : row + 1, :, COUNTS[term.row] :].double(), one, {"ref": one.latents})
        torch.testing.assert_close(
            batch.rollout_log_prob[row].double(), wanted["policy/log_prob_mean"][0].double(), rtol=1e-5, atol=1e-6
        )


@check_each(
    ("overrides", "message"),
    [
        (
            ["data.kind=prompts", "data.max_upscale=2"],
            r"max_num_conditional_frames needs captioned images or videos.*set data\.kind: paired",
        ),
        (
            ["algorithm.min_num_conditional_frames=0", "algorithm.max_num_conditional_frames=0"],
            "uses data.kind: paired only for conditioning frames: set algorithm.max_num_conditional_frames",
        ),
        (["algorithm.min_num_conditional_frames=2"], "min_num_conditional_frames 2 is above max_num"),
        (["validation.prompts=p.txt"], "validation.prompts has no frames, but every sample needs conditioning frames"),
        (["validation.num_images=3"], "does not read validation.num_images"),
        (["rollout.max_refills=1"], "rollout.max_refills is only for data.kind: prompts, not paired"),
    ],
)
def test_recipes_without_support_for_conditioning_frames_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe_file.load_recipe(RECIPE, overrides)
