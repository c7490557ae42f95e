"""Cosmos folders: which captions and videos are paired, and how bad entries are reported."""

import os

import pytest

import folders
from each_case import check_each
from wfm_ds.data.captioned_folder import CosmosFolder
from wfm_ds.errors import DataError


def put(folder, *names):
    folders.put(folder, {name: "a caption\n" if name.endswith(".txt") else None for name in names})


def scan(folder, max_bad_fraction=0.99, **options):
    return CosmosFolder(folder, max_bad_fraction=max_bad_fraction, **options)


def test_captions_and_videos_of_one_name_are_samples(tmp_path):
    put(
        tmp_path,
        "metas/b.txt",
        "videos/b.mp4",
        "metas/a.v2.txt",
        "videos/a.v2.mp4",
        "metas/sub/c.txt",
        "images/sub/c.jpg",
    )
    put(tmp_path, "videos/notes.txt", "metas/other.json", "README.md")
    found = scan(tmp_path, 0.0)
    assert [(s.id, s.media.path, s.prompt.text) for s in found.samples] == [
        ("a.v2", tmp_path / "videos/a.v2.mp4", "a caption"),
        ("b", tmp_path / "videos/b.mp4", "a caption"),
        ("sub/c", tmp_path / "images/sub/c.jpg", "a caption"),
    ]


def test_unreadable_captions_are_bad_samples(tmp_path):
    names = ("bytes", "good", "pipe", "surrogate")
    put(tmp_path, *(f"metas/{name}.txt" for name in names), *(f"videos/{name}.mp4" for name in names))
    (tmp_path / "metas/bytes.txt").write_bytes(b"caf\xe9")
    (tmp_path / "metas/surrogate.txt").write_bytes("\ud800".encode("utf-8", "surrogatepass"))
    (tmp_path / "metas/pipe.txt").unlink()
    os.mkfifo(tmp_path / "metas/pipe.txt")
    put(tmp_path, "t5_xxl/good.safetensors")
    (tmp_path / "text_embedding").mkdir()
    os.mkfifo(tmp_path / "text_embedding/good.safetensors")
    found = scan(tmp_path)
    [good] = found.samples
    assert (good.id, good.embedding) == ("good", tmp_path / "t5_xxl/good.safetensors")
    assert found.bad == {"no_prompt": [str(tmp_path / f"metas/{name}.txt") for name in ("bytes", "pipe", "surrogate")]}


def test_each_kind_of_bad_entry_is_counted(tmp_path):
    put(tmp_path, "metas/good.txt", "videos/good.mp4", "metas/alone.txt", "videos/mute.mp4", "metas/two.txt")
    put(tmp_path, "videos/two.mp4", "images/two.jpg", "metas/empty.txt", "videos/empty.mp4")
    put(tmp_path, "metas/latin.txt", "videos/latin.mp4")
    (tmp_path / "metas/empty.txt").write_text(" \n")
    (tmp_path / "metas/latin.txt").write_bytes(b"caf\xe9")
    found = scan(tmp_path)
    assert [s.id for s in found.samples] == ["good"]
    assert {reason: [name.removeprefix(f"{tmp_path}/") for name in names] for reason, names in found.bad.items()} == {
        "no_media": ["metas/alone.txt"],
        "no_json": ["videos/mute.mp4"],
        "ambiguous": ["videos/two.mp4"],
        "no_prompt": ["metas/empty.txt", "metas/latin.txt"],
    }
    with pytest.raises(DataError, match=r"5 of 6 samples are invalid"):
        scan(tmp_path, 0.5)


def test_embeddings_are_found_in_both_folders_and_pickles_only_if_allowed(tmp_path):
    for name in "abc":
        put(tmp_path, f"metas/{name}.txt", f"videos/{name}.mp4")
    put(tmp_path, "text_embedding/a.safetensors", "text_embedding/a.pickle", "t5_xxl/b.pickle", "t5_xxl/a.safetensors")

    def embeddings(**options):
        return [s.embedding and s.embedding.relative_to(tmp_path).as_posix() for s in scan(tmp_path, **options).samples]

    assert embeddings() == ["text_embedding/a.safetensors", None, None]
    assert embeddings(allow_pickle=True) == ["text_embedding/a.safetensors", "t5_xxl/b.pickle", None]


@check_each("made", [[], ["videos/a.mp4"], ["metas/a.txt"]])
def test_another_folder_is_refused_by_name(tmp_path, made):
    put(tmp_path, *made)
    with pytest.raises(DataError, match=r"is not a Cosmos folder: it must contain metas/ and videos/"):
        scan(tmp_path)
