"""On-policy distillation: the loss against the Gaussian KL in float64, the trained steps, the choice of teachers."""

import dataclasses

import pytest
import torch

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms.opd import OnPolicyDistillation
from wfm_ds.errors import RecipeError
from wfm_ds.sampling.denoise import transition_mean
from wfm_ds.types import ConditioningFrames, Prompt

GRID = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64)
SHAPE = (4, 3, 3)
GUIDED = [{"weights": "base", "guidance_scale": 4.0}]


def build(solver="ode", **keys):
    noise = {} if solver == "ode" else {"noise_level": 0.8}
    algorithm = {"name": "opd", "teachers": GUIDED, **keys}
    sampling = {"steps": 4, "solver": solver, **noise}
    lora = {"rank": 4, "alpha": 8, "init_from": "lora"}
    return OnPolicyDistillation(rl_recipe(algorithm, sampling=sampling, lora=lora, reward=None), GRID)


def roll_out(algorithm, count=3, **fields):
    """Return rollouts of a curved velocity, with their states."""
    noise = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))
    path = algorithm.plan(1).denoise(lambda x, sigma: torch.tanh(x) + sigma, noise, list(range(count)))
    return [
        make_rollout(i, path.clean_latents[i], states={k: x[i] for k, x in path.states.items()}, **fields)
        for i in range(count)
    ]


def test_the_kl_weight_gives_the_kl_of_the_gaussians_that_student_and_teacher_draw_from():
    algorithm = build(solver="cps", weighting="kl", num_levels=3)
    rollouts = roll_out(algorithm)
    (terms,) = algorithm.updates(on_one_rank(rollouts), [0.0] * 3, 1)
    assert sorted({t.denoise_step for t in terms}) == [0, 1, 2]  # the last step has no noise
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    v, t = torch.randn(2, len(terms), *SHAPE, dtype=torch.float64)
    loss, _ = algorithm.loss(v, batch, {"teacher_0": t})
    rows = algorithm.plan(1).table[[t.denoise_step for t in terms]]
    means = [transition_mean(velocity, batch.latents.double(), rows) for velocity in (v, t)]
    std = rows[:, 2].view(-1, 1, 1, 1)
    gaussians = [torch.distributions.Normal(mean, std.expand_as(mean)) for mean in means]
    expected = torch.distributions.kl_divergence(*gaussians).flatten(1).mean(1)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_each_term_uses_the_rollouts_input_of_its_step():
    algorithm = build(num_levels=2)
    rollouts = roll_out(algorithm)
    (terms,) = algorithm.updates(on_one_rank(rollouts), [0.0, None, 0.0], 1)
    assert [t.weight for t in terms] == [1, 1, 0, 0, 1, 1]
    assert all(len({t.denoise_step for t in terms if t.row == row}) == 2 for row in range(3))
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    for latents, term in zip(batch.latents, terms, strict=True):
        assert torch.equal(latents, rollouts[term.row].states[term.denoise_step])
        assert term.sigma == float(GRID[term.denoise_step])
    assert batch.distance_weight.tolist() == [1.0] * 6


def test_a_student_equal_to_its_teacher_has_no_loss_and_conditioning_frames_do_not_count():
    algorithm = build()
    rollouts = [make_rollout(0, torch.zeros(4, 2, 3, 3), states={k: torch.randn(4, 2, 3, 3) for k in range(4)})]
    (terms,) = algorithm.updates(on_one_rank(rollouts), [0.0], 1)
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    v, t = torch.randn(2, *batch.latents.shape)
    v.requires_grad_()
    loss, stats = algorithm.loss(v, batch, {"teacher_0": v.detach()})
    loss.sum().backward()
    assert not any(x.any() for x in (loss, stats["opd/distance"], v.grad))
    frames = ConditioningFrames(torch.zeros_like(t), torch.ones(len(t), dtype=torch.int64))
    loss, _ = algorithm.loss(v, dataclasses.replace(batch, conditioning_frames=frames), {"teacher_0": t})
    torch.testing.assert_close(loss, (v - t)[:, :, 1].square().mean((1, 2, 3)))


TEACHERS = [
    {"weights": "loras/ocr", "guidance_scale": 2, "when": {"task": "ocr"}},
    {"weights": "base", "guidance_scale": 5, "when": {"task": "color"}},
    {"weights": "init", "when": {"task": "count", "hard": True}},
]


def test_each_prompt_uses_the_teacher_of_its_metadata():
    algorithm = build(teachers=TEACHERS)
    assert algorithm.reference_weights == {"teacher_0": "teacher_0", "teacher_1": "ref", "teacher_2": "teacher_2"}
    assert algorithm.reference_guidance == {"teacher_0": 2.0, "teacher_1": 5.0, "teacher_2": 1.0}
    tasks = [{"task": "color"}, {"task": "count", "hard": True}, {"task": "ocr", "hard": True}]
    rollouts = roll_out(algorithm)
    rollouts = [
        make_rollout(i, r.clean_latents, states=r.states, prompt=Prompt(id=str(i), text="p", metadata=tasks[i]))
        for i, r in enumerate(rollouts)
    ]
    (terms,) = algorithm.updates(on_one_rank(rollouts), [0.0] * 3, 1)
    assert [t.teacher for t in terms] == [1, 2, 0]
    for term in terms:
        needed = [name for name in algorithm.references if algorithm.needs_reference(term, name)]
        assert needed == [f"teacher_{term.teacher}"]


TWICE = [{"guidance_scale": 2, "when": {"a": 1}}, {"guidance_scale": 3, "when": {"b": 1}}]


@check_each(
    ("teachers", "metadata", "count"),
    [
        (TEACHERS, {}, 0),
        (TEACHERS, {"task": "other"}, 0),
        (TEACHERS, {"task": "count", "hard": False}, 0),
        (TWICE, {"a": 1, "b": 1}, 2),
    ],
)
def test_a_prompt_without_one_teacher_is_refused(teachers, metadata, count):
    with pytest.raises(RecipeError, match=f"prompt q has {count} teachers"):
        build(teachers=teachers).settings.check_prompts([Prompt(id="q", text="q", metadata=metadata)])
