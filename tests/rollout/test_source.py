"""Rank 0 and its tasks for the workers. tests/multi_rank/test_async.py tests full runs."""

from pathlib import Path
from types import SimpleNamespace

from faults.processes import until
from transport.peers import DEADLINE_S, a_client, a_hub
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.groups import Group
from wfm_ds.rollout.remote.scheduler import ChunkScheduler
from wfm_ds.transport.broker import TaskKind
from wfm_ds.types import Prompt

RECIPE = Path(__file__).parent.parent / "recipes" / "sd3_nft_async.yaml"


def groups(step, count):
    """Return groups; the first prompt is too long for a message."""
    texts = ["x" * 2**17, *(f"color {i}" for i in range(1, count))]
    return [Group(prompt=Prompt(id=f"{step}/{i}", text=text)) for i, text in enumerate(texts)]


def test_a_prompt_too_long_for_a_message_is_a_failure_and_the_others_are_sent(stack):
    recipe = Recipe.model_validate(recipe_file.load_recipe(RECIPE).model_dump(mode="json"))
    count = recipe.rollout.prompts_per_step
    assert count > 1
    hub = a_hub(stack, kinds={TASK_KIND: TaskKind(60.0, {})})
    client = a_client(stack, hub)
    lead = ChunkScheduler(SimpleNamespace(recipe=recipe), "life", client, SimpleNamespace(broker=hub))
    steps = lead.admit_steps(0)
    assert steps == list(range(1, lead.coordinator.next_step))
    for step in steps:
        lead.submit_step(step, groups(step, count))
    for step in steps:
        assert lead.coordinator.num_waiting(step) == lead.coordinator.num_waiting(1) > 0
        waiting, closed = (getattr(lead.coordinator._steps[step], name) for name in ("waiting", "closed"))
        assert {chunk.group for chunk in waiting} == set(range(1, count))
        assert {chunk.group for chunk in closed} == {0}
        for chunk in closed.values():
            assert chunk.reason.startswith("cannot be sent: submit: header of ")
    sent = sum(lead.coordinator.num_waiting(step) for step in steps)
    until(lambda: hub.request_status().result(DEADLINE_S).counts.get("submitted") == sent)
