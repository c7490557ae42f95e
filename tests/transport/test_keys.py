"""Key files, and brokers and clients with the right keys, wrong keys or no keys."""

import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

from each_case import check_each
from faults.processes import until
from transport import peers
from transport.peers import DEADLINE_S, collect, create_peer_keys, submit
from wfm_ds.cli.main import main
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.keys import KeyFileError, create_key_pair, load_broker_keys, load_client_keys
from wfm_ds.transport.sockets import PipeError


@pytest.fixture
def folders(tmp_path):
    """Return the key folders of a broker and a client that know each other's keys."""
    hub, ann = tmp_path / "hub", tmp_path / "ann"
    create_key_pair(hub, "hub")
    create_peer_keys(ann, hub, accepted_by=hub)
    return hub, ann


def a_hub(stack, folder, clients="tcp://127.0.0.1:0"):
    """Start a broker that requires keys from clients, and a local worker without keys."""
    hub = peers.a_hub(stack, clients=clients, keys=load_broker_keys(folder))
    a_worker(stack, hub, None)
    return hub


def a_hub_for_machines(stack, folder, here="tcp://127.0.0.1:0"):
    """Start a broker that requires keys from clients and workers."""
    return peers.a_hub(stack, clients=here, workers=here, keys=load_broker_keys(folder), worker_keys=True)


def a_worker(stack, hub, its_keys, name="w"):
    def add_up(task, _):
        return {"sums": [int(t.sum()) for t in task.read_tensors()]}

    peers.a_worker(stack, hub, add_up, name, keys=its_keys)


def a_client(stack, hub, its_keys):
    return peers.a_client(stack, hub, keys=its_keys, attach=False)


def a_sum(client):
    submit(client, "t", tensors=[np.full((2000, 5000), 3, np.uint8)])
    return collect(client)["t"].meta["sums"]


# Broker and clients


def test_the_process_of_the_broker_needs_no_key(stack, folders):
    hub = a_hub(stack, folders[0])
    a_client(stack, hub, load_broker_keys(folders[0]).local_client_keys).attach(DEADLINE_S)
    a_client(stack, hub, load_client_keys(folders[0])).attach(DEADLINE_S)


def test_ipv6_addresses_are_supported(stack, folders):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    hub = a_hub_for_machines(stack, folders[0], "tcp://[::1]:0")
    a_worker(stack, hub, load_client_keys(folders[1]))
    client = a_client(stack, hub, load_client_keys(folders[1]))
    client.attach(DEADLINE_S)
    assert a_sum(client) == [30_000_000]


@pytest.mark.slow
def test_a_refusal_ends_the_wait(stack, folders, tmp_path):
    hub = a_hub(stack, folders[0])
    create_peer_keys(tmp_path / "bob", folders[0])
    pipes = tmp_path / "pipes.json"
    pipes.write_text('{"clients": "tcp://10.0.0.1:5"}')
    elsewhere = PipeClient(str(pipes), run="run", client="ann")
    stack.callback(elsewhere.close)
    refused = [a_client(stack, hub, load_client_keys(tmp_path / "bob")), elsewhere]
    with ThreadPoolExecutor(len(refused)) as pool:
        errors = [str(waiting.exception()) for waiting in [pool.submit(client.attach, 600) for client in refused]]
    for error, reason in zip(errors, ("the broker does not accept key bob", "tcp:// needs keys"), strict=True):
        assert re.match(rf"tcp://[\d.:]+: {reason}", error)


def says(client, words):
    """Wait until the broker rejects the client with this message."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        with pytest.raises(PipeError) as error:
            client.attach(0.5)
        if re.search(words, str(error.value)):
            return
        assert time.monotonic() < deadline_s, error.value


def test_an_unknown_key_is_an_error_until_the_broker_has_it(stack, folders, tmp_path):
    hub = a_hub(stack, folders[0])
    bob = tmp_path / "bob"
    create_peer_keys(bob, folders[0])
    client = a_client(stack, hub, load_client_keys(bob))
    says(client, r"the broker does not accept key bob: copy public/bob\.key to its key folder")
    shutil.copy(bob / "public" / "bob.key", folders[0] / "public")
    client.attach(DEADLINE_S)
    assert a_sum(client) == [30_000_000]


def test_an_invalid_key_file_does_not_affect_other_keys(stack, folders, caplog):
    """The file is half copied, empty, or deleted between listing and reading (a dangling link)."""
    hub = a_hub(stack, folders[0])
    for number, content in enumerate(("curve\n    public-key", 'curve\n    public-key = "half', "", None)):
        odd = folders[0] / "public" / f"odd{number}.key"
        odd.symlink_to("nowhere") if content is None else odd.write_text(content)
        for _ in range(2):
            a_client(stack, hub, load_client_keys(folders[1])).attach(DEADLINE_S)
        assert f"{odd} cannot be read as a key" in caplog.text


def test_a_wrong_or_missing_broker_key_is_an_error_and_nothing_is_delivered(stack, folders, tmp_path):
    hub = a_hub(stack, folders[0], clients=None)
    create_key_pair(tmp_path / "other", "hub")
    shutil.copy(tmp_path / "other" / "public" / "hub.key", folders[1] / "public")
    says(a_client(stack, hub, load_client_keys(folders[1])), r"public/hub\.key is not the broker's key")
    says(a_client(stack, hub, None), "the broker requires keys, or this is another service")
    shutil.copy(folders[0] / "public" / "hub.key", folders[1] / "public")
    good = a_client(stack, hub, load_client_keys(folders[1]))
    good.attach(DEADLINE_S)
    assert hub.rejected.total() == 0, "not a message of the others arrived"
    assert list(hub.request_status().result(DEADLINE_S).clients) == ["run/ann"]


def test_only_workers_with_an_accepted_key_get_tasks(stack, folders, tmp_path, caplog):
    hub_folder, ann = folders
    hub = a_hub_for_machines(stack, hub_folder)
    create_key_pair(tmp_path / "other", "hub")
    create_peer_keys(tmp_path / "eve", hub_folder)
    create_peer_keys(tmp_path / "bob", tmp_path / "other", accepted_by=hub_folder)
    a_worker(stack, hub, load_client_keys(tmp_path / "eve"), "unlisted")
    a_worker(stack, hub, load_client_keys(tmp_path / "bob"), "of another hub")
    client = a_client(stack, hub, load_client_keys(hub_folder))
    client.attach(DEADLINE_S)
    reasons = ("does not accept key eve: copy", "public/hub.key is not the broker's key")
    until(lambda: all(reason in caplog.text for reason in reasons))
    assert hub.worker_ids() == []
    a_worker(stack, hub, load_client_keys(ann), "ann")
    assert a_sum(client) == [30_000_000]
    assert hub.worker_ids() == ["ann"]
    assert hub.rejected.total() == 0, "not a message of the others arrived"
    shutil.copy(tmp_path / "eve" / "public" / "eve.key", hub_folder / "public")
    until(lambda: hub.worker_ids() == ["ann", "unlisted"])


def test_a_name_belongs_to_the_first_key_that_uses_it(stack, folders, tmp_path, caplog):
    """An accepted machine cannot take another machine's tasks or speak for another client."""
    hub_folder, ann = folders
    hub = a_hub_for_machines(stack, hub_folder)
    create_peer_keys(tmp_path / "eve", hub_folder, accepted_by=hub_folder)
    client = a_client(stack, hub, load_client_keys(hub_folder))
    client.attach(DEADLINE_S)
    a_worker(stack, hub, load_client_keys(ann), "w")
    until(lambda: hub.worker_ids() == ["w"])
    says(
        a_client(stack, hub, load_client_keys(tmp_path / "eve")), "client run/ann is already attached with another key"
    )
    a_worker(stack, hub, load_client_keys(tmp_path / "eve"), "w")
    until(lambda: "worker w is already connected with another key" in caplog.text)
    assert a_sum(client) == [30_000_000]
    assert hub.request_status().result(DEADLINE_S).counts.get("requeued", 0) == 0
    a_client(stack, hub, load_client_keys(hub_folder)).attach(DEADLINE_S)  # a restart of the first client


def test_a_broker_without_keys_is_an_error_for_a_client_with_keys(stack, folders):
    hub = peers.a_hub(stack)
    says(a_client(stack, hub, load_client_keys(folders[1])), "or it has none")


# Key files


def test_a_new_key_pair_is_private_and_never_overwritten(tmp_path):
    command = [sys.executable, "-m", "wfm_ds", "keys", "new", str(tmp_path / "k"), "ann"]
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
    assert again.stderr.startswith(f"error: {secret} already exists")


@check_each("there", ["ann.key_secret", "public/ann.key"])
def test_an_incomplete_key_pair_is_named_and_not_changed(tmp_path, there):
    create_key_pair(tmp_path, "ann")
    for file in {"ann.key_secret", "public/ann.key"} - {there}:
        (tmp_path / file).unlink()
    content = (tmp_path / there).read_bytes()
    for _ in range(2):
        with pytest.raises(KeyFileError, match=f"{re.escape(there)} already exists"):
            create_key_pair(tmp_path, "ann")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / there]
    assert (tmp_path / there).read_bytes() == content


def test_key_names_are_restricted(tmp_path, capsys):
    for name in ("", "../x", "a b", "a/b", "x" * 65):
        assert main(["keys", "new", str(tmp_path), name]) == 2
        assert "is not a valid key name" in capsys.readouterr().err


def test_secrets_that_others_can_read_are_refused(folders):
    hub, ann = folders
    (hub / "hub.key_secret").chmod(0o640)
    with pytest.raises(KeyFileError, match=r"hub\.key_secret: others can read this secret \(mode 0640\): chmod 600"):
        load_broker_keys(hub)
    (ann / "ann.key_secret").chmod(0o604)
    with pytest.raises(KeyFileError, match=r"mode 0604"):
        load_client_keys(ann)


@check_each("place", ["", "public"])
def test_folders_that_others_can_write_are_refused(folders, place):
    for folder, load in zip(folders, (load_broker_keys, load_client_keys), strict=True):
        before = (folder / place).stat().st_mode
        for mode in (0o777, 0o770, 0o702):
            (folder / place).chmod(mode)
            with pytest.raises(KeyFileError, match=rf"{place}: others can write keys here \(mode {mode:04o}\): chmod"):
                load(folder)
        (folder / place).chmod(before)
        load(folder)


def test_missing_and_invalid_keys_are_named(folders, tmp_path):
    hub, ann = folders
    with pytest.raises(KeyFileError, match=r"nowhere/hub\.key_secret cannot be read as a key"):
        load_broker_keys(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match=r"expected exactly one client key NAME\.key_secret, found none"):
        load_client_keys(hub / "public")
    create_key_pair(ann, "second")
    with pytest.raises(KeyFileError, match=r"found ann\.key_secret, second\.key_secret"):
        load_client_keys(ann)
    (ann / "second.key_secret").unlink()
    (ann / "public" / "hub.key").unlink()
    with pytest.raises(KeyFileError, match=r"public/hub\.key cannot be read as a key"):
        load_client_keys(ann)
    for content in ("", "curve\n", "public-key", 'curve\n    public-key = "short"\n', "\x00\xff"):
        (hub / "public" / "odd.key").write_text(content)
        with pytest.raises(KeyFileError, match=r"odd\.key cannot be read as a key"):
            load_broker_keys(hub)
    shutil.copy(hub / "public" / "hub.key", hub / "hub.key_secret")
    (hub / "hub.key_secret").chmod(0o600)
    (hub / "public" / "odd.key").unlink()
    with pytest.raises(KeyFileError, match="has no secret key"):
        load_broker_keys(hub)


def test_secrets_are_not_printed(folders):
    for some in (load_broker_keys(folders[0]), load_client_keys(folders[1])):
        assert some.secret.decode() not in repr(some)


def test_an_invalid_key_file_is_logged_once(folders, caplog):
    keys = load_broker_keys(folders[0])
    (folders[0] / "public" / "half.key").write_text("curve")
    assert not any(keys.is_allowed(b"x" * 40) for _ in range(100))
    assert len([record for record in caplog.records if "half.key" in record.getMessage()]) == 1
