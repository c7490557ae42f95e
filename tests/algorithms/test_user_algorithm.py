"""The algorithms of docs/own_algorithm.md, with the code of that page, compared with their formulas in float64."""

import dataclasses
import inspect
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from pages import table_rows, write_code
from wfm_ds.algorithms import base, build_rl_algorithm, engine_policy_copies
from wfm_ds.algorithms.advantages import Advantages, Rewards
from wfm_ds.algorithms.forward_process import ForwardBatch
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import EmaRecipe
from wfm_ds.sampling.latents import sample_mean
from wfm_ds.types import Prompt, Rollout, Transition

GRID = torch.linspace(1, 0, 5, dtype=torch.float64)
ADVANTAGES = [0.5, None, -1.0, 2.0]
OBJECTS = [Rewards, Advantages, base.StepSamples, Rollout, Transition, base.LossTerm, base.LossTermBatch, ForwardBatch]
# fields that the page omits
BUILT_IN_ONLY = {"Rewards": {"stats"}, "Rollout": {"states", "predictions", "is_finite"}, "LossTerm": {"teacher"}}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    for module in ("my_algorithm.py", "my_loss.py"):
        write_code("own_algorithm.md", module, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def made(name="my_algorithm:RewardWeighted", **keys):
        return Recipe.model_validate(
            {
                "run": {"output_dir": "out", "steps": 3},
                "model": {"path": "tiny:sd3"},
                "data": {"kind": "prompts", "path": "p"},
                "sampling": {"height": 32, "width": 32, "steps": 4},
                "algorithm": {"name": name, **keys},
                "rollout": {"prompts_per_step": 2, "group_size": 2},
                "reward": {"functions": [{"name": "color"}]},
            }
        )

    return made


def samples():
    draw = torch.Generator().manual_seed(0)
    return [
        Rollout(
            sample_id=str(i),
            group_id="g",
            prompt=Prompt(id="p", text="p"),
            seed=i,
            noise_seed=i,
            clean_latents=torch.randn(2, 4, 4, generator=draw),
        )
        for i in range(4)
    ]


def test_its_loss_is_the_formula_of_the_page(recipe):
    algorithm = build_rl_algorithm(recipe(temperature=0.5, levels=3), GRID)
    rollouts = samples()
    [terms] = algorithm.updates(SimpleNamespace(local_rollouts=rollouts, first_index=0), ADVANTAGES, step=1)
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    velocity = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(1))
    loss_B, stats = algorithm.loss(velocity, batch, {})

    weights = torch.tensor([2 * (a or 0.0) for a in ADVANTAGES], dtype=torch.float64).exp().repeat_interleave(3)
    error = (velocity.double() - batch.target.double()).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss_B.double(), weights * error, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats["weighted/factor"].double(), weights, rtol=1e-6, atol=0)
    assert batch.weight.tolist() == [1.0] * 3 + [0.0] * 3 + [1.0] * 6
    # Noisy latents and target use the same noise: x_s = x0 + sigma (eps - x0).
    clean = torch.stack([rollouts[t.row].clean_latents for t in terms])
    torch.testing.assert_close(batch.latents, clean + batch.sigma.view(-1, 1, 1, 1) * batch.target)


@pytest.mark.parametrize(("attribute", "policy"), [("references", ("ref", "old")), ("rollout_policy", "old")])
def test_a_policy_that_list_policies_does_not_name_is_an_error(recipe, monkeypatch, attribute, policy):
    made = recipe("my_loss:BestSamples")
    monkeypatch.setattr(sys.modules["my_loss"].BestSamples, attribute, policy)
    with pytest.raises(RecipeError, match=r"my_loss:BestSamples: .* names old, but list_policies of the settings"):
        build_rl_algorithm(made, GRID)


def test_ema_weights_need_the_section_ema(recipe, monkeypatch):
    made = recipe("my_loss:BestSamples")
    monkeypatch.setattr(sys.modules["my_loss"].BestSamples, "references", ("ref", "ema"))
    with pytest.raises(RecipeError, match=r"my_loss:BestSamples: references names ema: add the section `ema`"):
        build_rl_algorithm(made, GRID)
    build_rl_algorithm(made.model_copy(update={"ema": EmaRecipe(decay=0.5)}), GRID)


@pytest.mark.parametrize("with_reference", [True, False])
def test_its_loss_on_the_forward_process_is_the_formula_of_the_page(recipe, with_reference):
    made = recipe("my_loss:BestSamples", kl_beta=0.25, num_levels=2)
    assert not made.rl.algorithm.compares_log_probs
    assert engine_policy_copies(made) == {"ref"}
    algorithm = build_rl_algorithm(made, GRID)
    assert algorithm.references == ("ref",)
    rollouts = samples()
    [terms] = algorithm.updates(SimpleNamespace(local_rollouts=rollouts, first_index=0), ADVANTAGES, step=1)
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    velocity, ref_velocity = (torch.randn(batch.latents.shape, generator=draw) for _ in range(2))
    loss_B, stats = algorithm.loss(velocity, batch, {"ref": ref_velocity} if with_reference else {})

    credit = torch.tensor([0.5, 0.0, 0.0, 2.0], dtype=torch.float64).repeat_interleave(2)
    clean = torch.stack([rollouts[t.row].clean_latents for t in terms]).double()
    target = (batch.latents.double() - clean) / batch.sigma.double().view(-1, 1, 1, 1)
    error = sample_mean((velocity.double() - target).square())
    distance = sample_mean((velocity.double() - ref_velocity.double()).square()) * with_reference
    torch.testing.assert_close(loss_B.double(), credit * error + 0.25 * distance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats["kl/ref"].double(), distance, rtol=1e-5, atol=1e-6)


def test_the_numbers_of_a_step_follow_from_its_settings(recipe):
    assert derive_run_sizes(recipe(levels=3), world_size=2).terms_per_rank == 2 * 3


def test_a_class_with_settings_that_is_no_algorithm_is_refused(recipe, tmp_path):
    (tmp_path / "half_algorithm.py").write_text(
        "from my_algorithm import RewardWeightedSettings\n\nclass Half:\n    Settings = RewardWeightedSettings\n"
    )
    with pytest.raises(RecipeError, match=r"no class 'Half' that is a subclass of wfm_ds.algorithms.base.RlAlgorithm"):
        build_rl_algorithm(recipe("half_algorithm:Half"), GRID)


def test_the_table_of_objects_has_their_fields():
    """`ForwardBatch` inherits the fields of `LossTermBatch`, which the page lists once."""
    listed, name = {}, ""
    for cells in table_rows("own_algorithm.md", "| object |"):
        name = "".join(re.findall(r"^`(\w+)`", cells[0])) or name
        listed.setdefault(name, set()).update(re.findall(r"`(\w+)`", cells[1]))
    assert list(listed) == [kind.__name__ for kind in OBJECTS]
    for kind in OBJECTS:
        fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        fields |= {name for name, member in vars(kind).items() if isinstance(member, property)}
        inherited = {field.name for field in dataclasses.fields(base.LossTermBatch)} if kind is ForwardBatch else set()
        assert listed[kind.__name__] == fields - inherited - BUILT_IN_ONLY.get(kind.__name__, set()), kind


def test_the_table_of_calls_has_their_arguments():
    for cells in table_rows("own_algorithm.md", "| call | returns |"):
        name, arguments = re.match(r"`(\w+)\(([\w, ]*)\)`", cells[0]).groups()
        method = getattr(base.RlAlgorithm, name)
        assert arguments.split(", ") == [*inspect.signature(method).parameters][1:], name
        assert cells[3].startswith("none") == getattr(method, "__isabstractmethod__", False), name


def test_the_numbers_of_the_example_are_those_of_the_classes(recipe):
    """The page has the calls of the second of two ranks."""
    algorithm = build_rl_algorithm(recipe(levels=2), GRID)
    cells = dict(table_rows("own_algorithm.md", "| call | values |"))
    totals, groups, values = re.findall(r"`(\[.*?\])`", cells["`compute_advantages`"])
    rewards = Rewards([*map(parse_number, totals[1:-1].split(", "))], [None] * 4, (1.0,), {})
    advantages = algorithm.compute_advantages(rewards, groups[1:-1].split(", ")).values
    expected = [parse_number(value) for value in values[1:-1].split(", ")]
    assert [value if value is None else round(value, 3) for value in advantages] == expected
    [terms] = algorithm.updates(SimpleNamespace(local_rollouts=samples()[2:], first_index=2), advantages, step=1)
    assert [(term.row, term.weight) for term in terms] == [(0, 0.0), (0, 0.0), (1, 0.0), (1, 0.0)]
    assert "four loss terms of weight 0, with the rows 0, 0, 1, 1" in cells["`updates`"]


def parse_number(text):
    return None if text == "None" else float(text)
