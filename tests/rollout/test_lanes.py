"""Start and end of a rollout worker's threads (lanes). tests/multi_rank/test_async.py tests the generated samples."""

import threading
import time
from pathlib import Path

import pytest

from transport.peers import DEADLINE_S, a_client, a_hub
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.remote.worker import LOOK_S, WorkerLanes, parser
from wfm_ds.transport.broker import TaskKind

TINY = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize(("model", "stays"), [("sd3", True), ("wan", False)])
@pytest.mark.slow
def test_a_worker_reconnects_only_to_a_trainer_with_the_same_identity(stack, model, stays):
    recipe = recipe_file.load_recipe(TINY / "sd3_nft_async.yaml")
    scores = {f"score:{f.name}": TaskKind(60.0, {"max_batch": 8}) for f in recipe.reward.functions}
    rewards = a_hub(stack, name="rewards", kinds=scores).client_endpoint

    def a_trainer(pipeline):
        kinds = {TASK_KIND: TaskKind(60.0, {"identity": {"model": pipeline}, "rewards": rewards, "workers": workers})}
        return a_hub(stack, kinds=kinds)

    workers = f"ipc://{stack.folder}/w"
    first = a_trainer("sd3")
    client = a_client(stack, first, run="workers", name="w")
    args = parser().parse_args(["recipe.yaml", "--connect", first.client_endpoint, "--name", "w"])
    stop = threading.Event()
    lanes = WorkerLanes(recipe, None, client, None, client.kinds[TASK_KIND], args)
    thread = threading.Thread(target=lanes.run, args=[stop], daemon=True)
    thread.start()
    stack.callback(thread.join, DEADLINE_S)
    stack.callback(stop.set)
    first.stop(0.0)
    second = a_trainer(model)
    if not stays:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        return
    until_s = time.monotonic() + DEADLINE_S
    while len(second.worker_ids()) < recipe.rollout.in_flight and time.monotonic() < until_s:
        stop.wait(0.05)
    assert second.worker_ids() == [f"w/{i}" for i in range(recipe.rollout.in_flight)]
    thread.join(2 * LOOK_S)
    assert thread.is_alive()
