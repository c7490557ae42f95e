"""A rollout worker that connects over TCP with its key to the trainer and to the reward service.

Workers without a valid key are rejected. All processes are real.
"""

import json

import pytest
import yaml

from faults.rollout_processes import PATIENCE_S, start, train, until
from transport.peers import create_peer_keys
from wfm_ds.transport.keys import create_key_pair

REWARD = {"name": "probe_rewards:Brightness", "options": {"seconds": 0}}


@pytest.fixture
def keys(tmp_path):
    """Create key folders of the broker, an accepted worker, an unlisted one and one with a wrong broker key."""
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        create_key_pair(folder, "hub")
    for name, hub, accepted_by in (("good", here, here), ("unlisted", here, None), ("mistaken", other, here)):
        create_peer_keys(tmp_path / name, hub, accepted_by)
    return tmp_path


def address(pipes):
    """Wait for the file and return the endpoint for clients."""
    return until(lambda: pipes.exists() and json.loads(pipes.read_text())["clients"])


def test_only_a_worker_with_a_valid_key_generates(stack, tmp_path, keys, tiny_pipelines):
    config = {
        "pipes": {"clients": "tcp://127.0.0.1:0", "keys": str(keys / "here")},
        "rewards": {REWARD["name"]: {"options": REWARD["options"]}},
    }
    (tmp_path / "reward.yaml").write_text(yaml.safe_dump(config))
    start(stack, tmp_path / "reward.log", "wfm_reward.serve", str(tmp_path / "reward.yaml"))
    service = address(tmp_path / "pipes.json")
    trainer = train(
        stack,
        tmp_path,
        "async",
        tiny_pipelines("sd3"),
        *["rollout.mode=async", "rollout.max_staleness=0", "rollout.spawn=0"],
        *["rollout.bind=tcp://127.0.0.1:0", f"rollout.keys={keys / 'here'}"],
        *["reward.spawn=false", f"reward.endpoint={service}", f"reward.keys={keys / 'here'}"],
        f"reward.functions={json.dumps([REWARD])}",
        seconds=0,
    )
    run = tmp_path / "async"
    hub = address(run / "rollout" / "pipes.json")
    without = yaml.safe_load((run / "recipe.yaml").read_text())
    del without["rollout"]["keys"]
    (tmp_path / "without.yaml").write_text(yaml.safe_dump(without))

    def join(name, *words, recipe=run / "recipe.yaml"):
        log = tmp_path / f"{name}.log"
        return start(stack, log, "wfm_ds", "rollout", str(recipe), "--connect", hub, "--name", name, *words), log

    refused = {
        "does not accept key unlisted: copy public/unlisted.key": join("u", "--keys", str(keys / "unlisted")),
        "public/hub.key is not the broker's key": join("m", "--keys", str(keys / "mistaken")),
        "tcp:// needs keys": join("w", recipe=tmp_path / "without.yaml"),
        "nowhere: expected exactly one client key": join("n", "--keys", str(tmp_path / "nowhere")),
    }
    for sentence, (process, log) in refused.items():
        assert process.wait(PATIENCE_S) == 2
        lines = log.read_text().splitlines()
        assert [line for line in lines if line.startswith("error: ") and sentence in line] == lines[-1:]
    good, log = join("good", "--keys", str(keys / "good"), f"reward.keys={keys / 'good'}")
    assert trainer.wait(PATIENCE_S) == 0, (tmp_path / "async.log").read_text()
    assert good.wait(PATIENCE_S) == 0, log.read_text()
    assert "loaded publication 2" in log.read_text()
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
