import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from wfm_ds.storage import atomic


def write_folder(out, text="1", error=None):
    with atomic.new_folder(out) as making:
        (making / "file").write_text(text)
        if error is not None:
            raise error


def test_folder_appears_only_when_complete(tmp_path):
    with atomic.new_folder(tmp_path / "a" / "out") as making:
        (making / "file").write_text("1")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "1"
    assert os.listdir(tmp_path / "a") == ["out"]


def test_a_folder_in_which_a_file_still_grows_is_not_stale(tmp_path):
    folders = [tmp_path / name for name in ("live", "dead")]
    for folder in folders:
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "checkpoint" / "weights").touch()
        for path in (folder, folder / "checkpoint"):
            os.utime(path, (0.0, 0.0))  # folders that got their last file long ago
    os.utime(folders[1] / "checkpoint" / "weights", (0.0, 0.0))
    atomic.remove_stale(folders, time.time())
    assert [folder.exists() for folder in folders] == [True, False]


DIE = "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
WHILE_WRITING = "    (making / 'torn').write_text('2'); die()\n"
BETWEEN_RENAMES = (
    "    rename = Path.rename\n    Path.rename = lambda source, to: die() if source == making else rename(source, to)\n"
)


@pytest.mark.parametrize("moment", [WHILE_WRITING, BETWEEN_RENAMES])
def test_killed_writer_loses_nothing_and_the_next_one_cleans_up(tmp_path, moment):
    out = tmp_path / "out"
    write_folder(out)
    imports = "import os, signal, sys; from pathlib import Path; from wfm_ds.storage import atomic\n"
    code = f"{imports}{DIE}with atomic.new_folder(Path(sys.argv[1])) as making:\n{moment}"
    process = subprocess.run([sys.executable, "-c", code, str(out)], timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert out.exists() == (moment == WHILE_WRITING)
    assert (tmp_path / ".out.wfm-tmp").exists()
    with pytest.raises(KeyboardInterrupt):
        write_folder(out, "2", KeyboardInterrupt())
    assert (out / "file").read_text() == "1"
    assert os.listdir(tmp_path) == ["out"]
    write_folder(out, "3")
    assert (os.listdir(tmp_path), os.listdir(out), (out / "file").read_text()) == (["out"], ["file"], "3")


def test_folders_with_similar_names_are_kept(tmp_path):
    for name in ("out", "out.tmp", "out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("1")
    with atomic.new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out.tmp" / "mine").exists()
    assert (tmp_path / "out.old" / "mine").exists()


def test_text_is_replaced_atomically(tmp_path):
    path = tmp_path / "result.json"
    atomic.write_text(path, "one")
    with path.open() as reader:  # still reads the old file after the replacement
        atomic.write_text(path, "zw\u00f6lf")
        assert reader.read() == "one"
    assert path.read_text(encoding="utf-8") == "zw\u00f6lf"
    assert os.listdir(tmp_path) == ["result.json"]


def test_concurrent_writers_of_a_file_do_not_interfere(tmp_path):
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
