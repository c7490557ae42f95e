"""Keys: their files, and hubs and clients that have the right ones, the wrong ones or none."""

import shutil
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import zmq

from wfm_ds.pipes import keys
from wfm_ds.pipes.client import PipeClient, TaskRequest
from wfm_ds.pipes.hub import Hub, Kind
from wfm_ds.pipes.keys import KeyFileError, client_keys, hub_keys, new
from wfm_ds.pipes.sockets import PipeError, check_endpoint, private_folder
from wfm_ds.pipes.worker import LeaseWorker

DEADLINE_S = 20.0


@pytest.fixture
def folders(tmp_path):
    """The folder of a hub and that of a client which know each other."""
    hub, ann = tmp_path / "hub", tmp_path / "ann"
    new(hub, "hub")
    new(ann, "ann")
    exchange(hub, ann, "ann")
    return hub, ann


def exchange(hub, client, name):
    shutil.copy(hub / "public" / "hub.key", client / "public")
    shutil.copy(client / "public" / f"{name}.key", hub / "public")


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def a_hub(stack, folder):
    sockets = private_folder()
    stack.callback(lambda: shutil.rmtree(sockets))
    hub = Hub(
        clients="tcp://127.0.0.1:0", workers=f"ipc://{sockets}/w", kinds={"sum": Kind(10.0, {})}, keys=hub_keys(folder)
    )
    hub.start()
    stack.callback(lambda: hub.stop(0.0))
    worker = LeaseWorker(hub.worker_endpoint, worker="w", name="w", kinds=["sum"])
    thread = threading.Thread(
        target=worker.run, args=(lambda task, _: {"sums": [int(t.sum()) for t in task.tensors()]},), daemon=True
    )
    thread.start()
    stack.callback(lambda: (worker.stop(), thread.join(DEADLINE_S)))
    return hub


def a_client(stack, hub, its_keys):
    client = PipeClient(hub.client_endpoint, run="run", client="ann", keys=its_keys)
    stack.callback(client.close)
    return client


def a_sum(client):
    deadline_s = time.monotonic() + DEADLINE_S
    client.submit([{}], [("media", np.full((2000, 5000), 3, np.uint8))], [TaskRequest("t", "sum", 0, 1, deadline_s)])
    (outcome,) = client.take(DEADLINE_S)
    return outcome.meta["sums"]


# Between hub and clients


def test_a_client_with_its_key_is_served(stack, folders):
    hub = a_hub(stack, folders[0])
    client = a_client(stack, hub, client_keys(folders[1]))
    client.attach(DEADLINE_S)
    assert a_sum(client) == [30_000_000]


def test_the_hubs_own_process_is_let_in(stack, folders):
    secrets = hub_keys(folders[0])
    sockets = private_folder()
    stack.callback(lambda: shutil.rmtree(sockets))
    hub = Hub(clients="tcp://127.0.0.1:0", workers=f"ipc://{sockets}/w", kinds={}, keys=secrets)
    hub.start()
    stack.callback(lambda: hub.stop(0.0))
    a_client(stack, hub, secrets.insider).attach(DEADLINE_S)


def says(client, words):
    """It is not let in, and says why within the time that a user waits."""
    with pytest.raises(PipeError, match=words):
        client.attach(3.0)


def test_a_key_that_the_hub_does_not_know_is_a_sentence_until_it_does(stack, folders, tmp_path):
    hub = a_hub(stack, folders[0])
    bob = tmp_path / "bob"
    new(bob, "bob")
    shutil.copy(folders[0] / "public" / "hub.key", bob / "public")
    client = a_client(stack, hub, client_keys(bob))
    says(client, r"the hub does not know the key bob: copy public/bob\.key to its folder of keys")
    shutil.copy(bob / "public" / "bob.key", folders[0] / "public")
    client.attach(DEADLINE_S)
    assert a_sum(client) == [30_000_000]


def test_another_hubs_key_and_no_key_are_sentences_and_nothing_is_delivered(stack, folders, tmp_path):
    hub = a_hub(stack, folders[0])
    new(tmp_path / "other", "hub")
    shutil.copy(tmp_path / "other" / "public" / "hub.key", folders[1] / "public")
    says(a_client(stack, hub, client_keys(folders[1])), r"the hub has another key than public/hub\.key here")
    says(a_client(stack, hub, None), "the hub wants keys, or this is no hub")
    exchange(*folders, "ann")
    good = a_client(stack, hub, client_keys(folders[1]))
    good.attach(DEADLINE_S)
    assert hub.rejected.total() == 0, "not a message of the others arrived"
    assert list(hub.status().result(DEADLINE_S).clients) == ["run/ann"]


def test_a_hub_without_keys_is_a_sentence_for_a_client_with_some(stack, folders):
    sockets = private_folder()
    stack.callback(lambda: shutil.rmtree(sockets))
    hub = Hub(clients="tcp://127.0.0.1:0", workers=f"ipc://{sockets}/w", kinds={})
    hub.start()
    stack.callback(lambda: hub.stop(0.0))
    says(a_client(stack, hub, client_keys(folders[1])), "or uses none")


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.5:6100", "tcp://example.org:5", "tcp://[fe80::1]:5", "ipc:///x"])
def test_other_addresses_are_for_keys_alone(endpoint):
    assert check_endpoint(endpoint, keys=True) == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://[::]:5"])
def test_not_even_keys_listen_everywhere(endpoint):
    with pytest.raises(PipeError, match="name one address of this machine"):
        check_endpoint(endpoint, keys=True)


# Files


def test_a_new_pair_is_private_and_never_overwritten(tmp_path):
    command = [sys.executable, "-m", "wfm_ds.pipes.keys", "new", str(tmp_path / "k"), "ann"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, umask=0)
    secret, public = tmp_path / "k" / "ann.key_secret", tmp_path / "k" / "public" / "ann.key"
    assert [str(secret), str(public)] == [line.split()[1] for line in done.stdout.splitlines()]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert zmq.auth.load_certificate(secret)[0] == zmq.auth.load_certificate(public)[0]
    assert zmq.auth.load_certificate(secret)[1].decode() not in public.read_text() + done.stdout
    before = secret.read_bytes()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, secret.read_bytes()) == (2, before)
    assert again.stderr.startswith(f"error: {secret} is there already")


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "x" * 65])
def test_a_name_is_plain(tmp_path, name, capsys):
    assert keys.main(["new", str(tmp_path), name]) == 2
    assert "is no name for a key" in capsys.readouterr().err


def test_secrets_that_others_can_read_are_refused(folders):
    hub, ann = folders
    (hub / "hub.key_secret").chmod(0o640)
    with pytest.raises(KeyFileError, match=r"hub\.key_secret: others can read this secret \(mode 0640\): chmod 600"):
        hub_keys(hub)
    (ann / "ann.key_secret").chmod(0o604)
    with pytest.raises(KeyFileError, match=r"mode 0604"):
        client_keys(ann)


def test_what_is_missing_or_no_key_is_named(folders, tmp_path):
    hub, ann = folders
    with pytest.raises(KeyFileError, match=r"nowhere/hub\.key_secret cannot be read as a key"):
        hub_keys(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match=r"one key of a client is needed, NAME\.key_secret; found none"):
        client_keys(hub)
    new(ann, "second")
    with pytest.raises(KeyFileError, match=r"found ann\.key_secret, second\.key_secret"):
        client_keys(ann)
    (ann / "second.key_secret").unlink()
    (ann / "public" / "hub.key").unlink()
    with pytest.raises(KeyFileError, match=r"public/hub\.key cannot be read as a key"):
        client_keys(ann)
    for content in ("", "curve\n", 'curve\n    public-key = "short"\n', "\x00\xff"):
        (hub / "public" / "odd.key").write_text(content)
        with pytest.raises(KeyFileError, match=r"odd\.key cannot be read as a key"):
            hub_keys(hub)
    shutil.copy(hub / "public" / "hub.key", hub / "hub.key_secret")
    (hub / "hub.key_secret").chmod(0o600)
    (hub / "public" / "odd.key").unlink()
    with pytest.raises(KeyFileError, match="holds no secret key"):
        hub_keys(hub)


def test_secrets_are_not_printed(folders):
    for some in (hub_keys(folders[0]), client_keys(folders[1])):
        assert some.secret.decode() not in repr(some)
