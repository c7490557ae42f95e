"""What a run leaves behind when its main thread and the heartbeat's both end it."""

import json
import threading
from types import SimpleNamespace

import torch

from wfm_ds.distributed.world import World
from wfm_ds.run.ending import Ending
from wfm_ds.run.folder import Start


def test_the_first_of_two_failures_is_recorded(tmp_path):
    ending = Ending(tmp_path, World(0, 1, 0, torch.device("cpu"), None))
    ending.start, ending.loop = Start(), SimpleNamespace(step=3, metrics={})
    ending.judged("rank 1 is gone")
    late = threading.Thread(target=ending.failed, args=["RuntimeError: Connection closed by peer"])
    late.start()
    late.join()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"], result["message"]) == ("failed", 3, "rank 1 is gone")
