"""Caption cache: unchanged caption files are read only on the first start, and possibly changed files are always read
again."""

import json
import os
import time

import pytest

from wfm_ds.data import captioned_folder
from wfm_ds.data.captioned_folder import CaptionedFolder, CosmosFolder
from wfm_ds.recipe.shared_defaults import user_cache_folder

LATER_NS = int(2 * captioned_folder.RECENT_S * 1e9)  # at this time no file written by a test counts as recent


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "sub/b", "bad"):
        write(tmp_path / "media", name, f"a picture of {name}")
        (tmp_path / "media" / f"{name}.png").touch()
    (tmp_path / "media" / "bad.json").write_text("{}")
    return tmp_path / "media"


@pytest.fixture
def reads(monkeypatch):
    """Return the list of caption files read so far."""
    read, names = captioned_folder.read_regular, []

    def counted(path):
        names.append(os.path.basename(path))
        return read(path)

    monkeypatch.setattr(captioned_folder, "read_regular", counted)
    return names


@pytest.fixture
def later(monkeypatch):
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + LATER_NS)


def write(folder, name, prompt, **more):
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"prompt": prompt, **more}))
    return path


def scan(folder):
    found = CaptionedFolder(folder, max_bad_fraction=0.9, cache_dir=folder.parent / "cache")
    return {sample.id: sample.prompt.text for sample in found.samples}, found.bad


def test_a_second_scan_reads_no_caption_that_is_unchanged(folder, reads, later):
    write(folder, "a", "first", negative_prompt="blur", label=7)
    first = scan(folder)
    assert sorted(reads) == ["a.json", "b.json", "bad.json"]
    reads.clear()
    assert scan(folder) == first
    assert first == ({"a": "first", "sub/b": "a picture of sub/b"}, {"no_prompt": [f"{folder}/bad.json"]})
    assert reads == []
    sample = CaptionedFolder(folder, max_bad_fraction=0.9, cache_dir=folder.parent / "cache").samples[0]
    assert (sample.prompt.negative_text, sample.prompt.metadata) == ("blur", {"label": 7})


def test_a_cosmos_folder_keeps_its_captions_too(tmp_path, reads, later):
    for name in ("metas/a.txt", "metas/mute.txt", "videos/a.mp4", "videos/mute.mp4"):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a caption" if name == "metas/a.txt" else "")

    def scan_cosmos():
        found = CosmosFolder(tmp_path / "set", max_bad_fraction=0.9, cache_dir=tmp_path / "cache")
        return [(sample.id, sample.prompt.text) for sample in found.samples], found.bad

    first = scan_cosmos()
    assert sorted(reads) == ["a.txt", "mute.txt"]
    reads.clear()
    assert scan_cosmos() == first == ([("a", "a caption")], {"no_prompt": [str(tmp_path / "set/metas/mute.txt")]})
    assert reads == []


def test_a_caption_of_the_same_size_and_time_of_change_is_read_again(folder, reads, later):
    """`cp -p` and `touch -r` preserve size and mtime; only the inode's change time (ctime) differs."""
    path = write(folder, "a", "first")
    scan(folder)
    status = path.stat()
    path.write_text(path.read_text().replace("first", "other"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert scan(folder)[0]["a"] == "other"
    write(folder, "new", "third").rename(path)  # a file that took its place
    assert scan(folder)[0]["a"] == "third"


def test_recently_changed_captions_are_not_cached(folder, reads):
    """A change within one tick of the file system clock does not change the timestamp."""
    assert scan(folder) == scan(folder)
    assert sorted(reads) == sorted(2 * ["a.json", "b.json", "bad.json"])


def test_removed_and_new_captions_are_detected(folder, reads, later):
    scan(folder)
    (folder / "sub/b.json").unlink()
    write(folder, "c", "new")
    (folder / "c.png").touch()
    reads.clear()
    found, bad = scan(folder)
    assert found == {"a": "a picture of a", "c": "new"}
    assert bad["no_json"] == [f"{folder}/sub/b.png"]
    assert reads == ["c.json"]
    [file] = (folder.parent / "cache" / "captions").iterdir()
    assert json.loads(file.read_text())["captions"].keys() == {"a.json", "bad.json", "c.json"}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 1, "folder": "elsewhere", "captions": {}}', "[" * 9999]
)
def test_a_damaged_cache_is_read_anew(folder, reads, later, content):
    want = scan(folder)
    [file] = (folder.parent / "cache" / "captions").iterdir()
    file.write_text(content)
    assert scan(folder) == want
    reads.clear()
    assert scan(folder) == want
    assert reads == []


def test_a_cache_that_cannot_be_written_does_no_harm(folder, reads, later, caplog):
    (folder.parent / "cache").write_text("a file")
    with caplog.at_level("INFO"):
        assert scan(folder)[0].keys() == {"a", "sub/b"}
    assert "cannot be written, captions are read at each start" in caplog.text


def test_the_users_cache_is_where_the_tiny_pipelines_are(monkeypatch, tmp_path):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path))
    assert user_cache_folder() == tmp_path
    monkeypatch.delenv("WFM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "wfm_ds"
