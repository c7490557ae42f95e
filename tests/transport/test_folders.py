"""Socket folders: kept while their owner runs, removed by the next start; all other folders stay."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
import zmq

from wfm_ds.errors import UserError
from wfm_ds.transport.socket_folders import FOLDER_PREFIX, SocketFolder, hold_folder, remove_orphaned_folders
from wfm_ds.transport.sockets import MessagePort

OWNER = """
import sys, zmq
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import MessagePort
folder = SocketFolder()
router = MessagePort(zmq.Context(), f"ipc://{folder.path}/clients", None, (), {})
print(folder.path, flush=True)
sys.stdin.read()
"""
GUEST = """
import sys, zmq
from wfm_ds.transport.sockets import MessagePort
router = MessagePort(zmq.Context(), f"ipc://{sys.argv[1]}/workers", None, (), {})
print("bound", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path_factory):
    """Return the folder in which this process and its child processes create socket folders."""
    base = tmp_path_factory.mktemp("s", numbered=True)
    short = f"/tmp/{FOLDER_PREFIX}test-{os.getpid()}-{base.name}"
    os.symlink(base, short)
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    yield base
    os.unlink(short)


@pytest.fixture
def started(root):
    """Return `started(code, *words)`, which gives a process and its first output line."""
    processes = []

    def start(code, *words):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_the_next_start_removes_folders_of_killed_processes_only(base, started):
    killed, left = started(OWNER)
    _, in_use = started(OWNER)
    kill(killed)
    assert sorted(os.listdir(left)) == ["clients", "clients.lock"]
    with SocketFolder() as mine:
        assert not os.path.exists(left)
        assert sorted(os.listdir(in_use)) == ["clients", "clients.lock"]
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert sorted(base.iterdir()) == sorted([mine.resolve(), base / os.path.basename(in_use)])
    assert not mine.exists()


def test_a_folder_is_in_use_while_a_socket_in_it_is_bound(base, started):
    owner, left = started(OWNER)
    guest, said = started(GUEST, left)
    assert said == "bound"
    kill(owner)
    assert remove_orphaned_folders(base) == []
    kill(guest)
    assert [path.name for path in remove_orphaned_folders(base)] == [os.path.basename(left)]
    assert not list(base.iterdir())


def test_unrelated_folders_are_kept(base):
    (base / "wfm-pipes-notebook").mkdir()
    (base / "wfm-pipes-4242-notebook").mkdir()  # another user's number
    (base / "wfm-policy-12345678").mkdir()
    (base / f"{FOLDER_PREFIX}afile123").write_text("")
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / "kept").write_text("")
    (base / f"{FOLDER_PREFIX}alink123").symlink_to(base / "elsewhere")
    (base / f"{FOLDER_PREFIX}afolder1" / "inside").mkdir(parents=True)
    before = sorted(base.rglob("*"))
    assert remove_orphaned_folders(base) == []
    assert sorted(base.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folders_of_other_users_are_kept(base):
    (base / f"{FOLDER_PREFIX}another1").mkdir()
    os.chown(base / f"{FOLDER_PREFIX}another1", 12345, 12345)
    assert remove_orphaned_folders(base) == []
    assert hold_folder(base / f"{FOLDER_PREFIX}another1") is None


def test_a_removed_folder_is_created_again(base):
    folder = SocketFolder()
    os.rmdir(folder.path)  # a service does this when it ends
    folder.restore()
    assert remove_orphaned_folders(base) == []
    folder.remove()
    folder.remove()
    assert not list(base.iterdir())


def test_new_folders_survive_a_concurrent_cleanup(base):
    """Before it is locked, a new folder looks like an orphaned one."""
    stop = threading.Event()

    def sweep_on():
        while not stop.is_set():
            remove_orphaned_folders(base)

    sweepers = [threading.Thread(target=sweep_on) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    try:
        for _ in range(200):
            with SocketFolder() as path:
                assert path.is_dir()
                (path / "mine").write_text("")
                assert remove_orphaned_folders(base) == []
                assert (path / "mine").exists()
    finally:
        stop.set()
        for thread in sweepers:
            thread.join()


def test_a_router_keeps_its_folder_in_use_until_it_removes_its_files(base):
    context, folder = zmq.Context(), SocketFolder()
    router = MessagePort(context, f"ipc://{folder.path}/clients", None, frozenset(), {})
    folder._unlock()  # as if its creator was killed
    assert remove_orphaned_folders(base) == []
    router.close()
    context.term()
    router.remove_files()
    assert remove_orphaned_folders(base) == [base / folder.path.name]


def test_no_writable_folder_for_sockets_is_a_user_error(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/place")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "x" * 100)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="set TMPDIR"):
        SocketFolder()
