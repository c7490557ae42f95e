import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from wfm_ds.storage import atomic


def test_folder_appears_only_when_complete(tmp_path):
    with atomic.new_folder(tmp_path / "a" / "out") as making:
        (making / "file").write_text("1")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "1"
    assert os.listdir(tmp_path / "a") == ["out"]


def test_failed_writer_leaves_the_earlier_folder(tmp_path):
    out = tmp_path / "out"
    with atomic.new_folder(out) as making:
        (making / "file").write_text("1")

    def fail():
        with atomic.new_folder(out) as making:
            (making / "file").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (out / "file").read_text() == "1"
    assert os.listdir(tmp_path) == ["out"]


def test_killed_writer_leaves_the_earlier_folder_and_the_next_one_cleans_up(tmp_path):
    out = tmp_path / "out"
    with atomic.new_folder(out) as making:
        (making / "file").write_text("1")
    killed = (
        "import os, signal, sys; from pathlib import Path; from wfm_ds.storage import atomic\n"
        "with atomic.new_folder(Path(sys.argv[1])) as making:\n"
        "    (making / 'torn').write_text('2'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", killed, str(out)], timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert (out / "file").read_text() == "1"
    assert (tmp_path / ".out.wfm-tmp" / "torn").exists()
    with atomic.new_folder(out) as making:
        (making / "file").write_text("3")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["file"]


def test_writer_killed_between_its_renames_has_not_lost_the_earlier_folder(tmp_path):
    out = tmp_path / "out"
    with atomic.new_folder(out) as making:
        (making / "file").write_text("1")
    killed = (
        "import os, signal, sys; from pathlib import Path; from wfm_ds.storage import atomic\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "with atomic.new_folder(Path(sys.argv[1])) as making:\n"
        "    rename = Path.rename\n"
        "    Path.rename = lambda source, to: die() if source == making else rename(source, to)\n"
    )
    process = subprocess.run([sys.executable, "-c", killed, str(out)], timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()

    def fail():
        with atomic.new_folder(out):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (out / "file").read_text() == "1"
    assert os.listdir(tmp_path) == ["out"]


def test_folders_of_similar_names_are_the_users(tmp_path):
    for name in ("out", "out.tmp", "out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("1")
    with atomic.new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out.tmp" / "mine").exists()
    assert (tmp_path / "out.old" / "mine").exists()


def test_text_is_replaced_whole(tmp_path):
    path = tmp_path / "result.json"
    atomic.write_text(path, "one")
    with path.open() as reader:  # has the old file, whatever happens to the name
        atomic.write_text(path, "zw\u00f6lf")
        assert reader.read() == "one"
    assert path.read_text(encoding="utf-8") == "zw\u00f6lf"
    assert os.listdir(tmp_path) == ["result.json"]


def test_writers_of_one_file_at_a_time_do_not_meet(tmp_path):
    path = tmp_path / "index.json"
    with atomic.new_file(path) as slow, atomic.new_file(path) as quick:
        slow.write_text("slow")
        quick.write_text("quick")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: atomic.write_text(path, text), ["same"] * 64))
    assert path.read_text() == "same"
    assert os.listdir(tmp_path) == ["index.json"]


def test_failed_writer_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "out"
    atomic.write_text(path, "1")

    def fail():
        with atomic.new_file(path) as part:
            part.write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "1"
    assert os.listdir(tmp_path) == ["out"]
