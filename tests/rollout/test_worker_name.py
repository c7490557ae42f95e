"""The name of a rollout worker: a hub tells its workers apart by it."""

import pytest

from wfm_ds.rollout.remote import worker
from wfm_ds.rollout.remote.worker import MAX_NAME_CHARS, default_worker_name, parser
from wfm_ds.transport import wire

NEEDED = ["recipe.yaml", "--connect", "pipes.json"]


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
