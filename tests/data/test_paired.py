"""Paired folders: all file names that users may choose, every kind of bad entry, and a stable holdout split."""

import json
import os
from pathlib import Path

import pytest

import folders
from each_case import check_each
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.media import load_media, media_size
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError


def put(folder, name, prompt="a cat", **more):
    """Write a caption and an empty media file; pairing does not open media."""
    folders.put(folder, {f"{name}.json": json.dumps({"prompt": prompt, **more}), f"{name}.png": None})


def scan(folder, max_bad_fraction=0.99):
    return CaptionedFolder(folder, max_bad_fraction=max_bad_fraction)


def ids(folder):
    return [sample.id for sample in folder.samples]


def pairs(*names, media=(".png",)):
    captions = {f"{name}.json": '{"prompt": "a cat"}' for name in names}
    return captions | {f"{name}{media[i % len(media)]}": None for i, name in enumerate(names)}


EVERY_MEDIUM = (".PNG", ".Jpg", ".jpeg", ".WEBP", ".mp4", ".WebM", ".mkv", ".MOV", ".avi")
NO_PAIRS = ("notes.txt", ".DS_Store", "._a.png", ".hidden.json", ".cache/x.png", "LICENSE")


@check_each(
    ("files", "wanted"),
    [
        (pairs("b", "sub/deep/a", "a.b", "a"), ["a", "a.b", "b", "sub/deep/a"]),
        (pairs("a.json.b", "x.png.y"), ["a.json.b", "x.png.y"]),  # only the last suffix is removed
        (pairs("json/a", "images.png/b.json/c"), ["images.png/b.json/c", "json/a"]),  # folders with names of files
        (pairs(*"abcdefghi", media=EVERY_MEDIUM), list("abcdefghi")),
        ({"a.JSON": '{"prompt": "a cat"}', "a.png": None} | dict.fromkeys(NO_PAIRS), ["a"]),
        (pairs(os.fsdecode(b"caf\xe9")), ["caf\\udce9"]),
    ],
)
def test_pairs_of_any_name_are_found_and_sorted_by_id(tmp_path, files, wanted):
    found = scan(folders.put(tmp_path, files), 0.0)
    assert (ids(found), found.bad) == (wanted, {})
    stems = [str(sample.media.path.relative_to(tmp_path).with_suffix("")) for sample in found.samples]
    assert [stem.encode("utf-8", "backslashreplace").decode() for stem in stems] == wanted


def test_a_scan_shows_that_it_goes_on_and_begins_no_operation(tmp_path):
    for number in range(20):
        put(tmp_path, str(number))
    num_begun, num_advances = LIVENESS.num_started, LIVENESS.num_advances
    scan(tmp_path)
    assert LIVENESS.num_started == num_begun
    assert LIVENESS.num_advances >= num_advances + 20


def test_a_caption_becomes_a_prompt_with_metadata(tmp_path):
    put(tmp_path, "a", prompt="  \U0001f431 7\n", negative_prompt="blurry", label=7, spec={"count": [1, 2]})
    assert "\\ud83d\\udc31" in (tmp_path / "a.json").read_text()  # two halves of a pair are one character
    (sample,) = scan(tmp_path).samples
    assert (sample.prompt.id, sample.prompt.text) == ("a", "\U0001f431 7")
    assert sample.prompt.negative_text == "blurry"
    assert sample.prompt.metadata == {"label": 7, "spec": {"count": [1, 2]}}


SURROGATE = '{"prompt": "a \\ud800 cat"}'
BAD_TEXTS = [SURROGATE, '{"prompt": "a", "negative_prompt": "\\udfff"}', '{"prompt": "a", "of": {"\\ud800": [1]}}']


@check_each("caption", [*BAD_TEXTS, '{"prompt": "a", "list": ["\\ud800"]}', "pipe", "device"])
def test_text_that_utf8_cannot_encode_and_captions_that_are_no_files_are_bad_samples(tmp_path, caption):
    put(tmp_path, "good")
    put(tmp_path, "bad")
    if caption in ("pipe", "device"):
        no_file(tmp_path / "bad.json", caption)
    else:
        (tmp_path / "bad.json").write_text(caption)
    found = scan(tmp_path)
    assert (ids(found), found.bad) == (["good"], {"no_prompt": [str(tmp_path / "bad.json")]})


def test_names_that_are_no_text_can_be_hashed_and_written(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    put(tmp_path, name)
    (tmp_path / f"{name}2.png").touch()
    found = scan(tmp_path)
    (sample,) = found.samples
    for text in (sample.id, sample.media.name, *found.bad["no_json"]):
        assert "caf\\udce9" in text
        text.encode()
    with sample.media.open():
        pass


@check_each("kind", ["pipe", "device"])
@check_each("suffix", [".png", ".mp4"])
def test_a_medium_that_is_no_file_is_bad_by_name(tmp_path, kind, suffix):
    path = no_file(tmp_path / f"bad{suffix}", kind)
    for read in (lambda media: load_media(media, Framing(height=8, width=8), draw_centre), media_size):
        with pytest.raises(
            BadMedia, match=f"bad{suffix}: cannot be decoded, OSError: .*is not a regular file"
        ) as caught:
            read(LocalFile(path))
        assert (caught.value.reason, caught.value.name) == ("decode", str(path))


def no_file(path, kind):
    """Replace a file by a pipe without a writer, or by an endless device."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


def test_linked_folders_are_followed_once(tmp_path):
    put(tmp_path / "elsewhere", "a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "data")
    assert ids(scan(tmp_path / "data", 0.0)) == ["link/a"]


def test_each_kind_of_bad_entry_is_counted_with_its_path(tmp_path):
    put(tmp_path, "good")
    put(tmp_path, "lonely_json")
    (tmp_path / "lonely_json.png").unlink()
    put(tmp_path, "lonely_image")
    (tmp_path / "lonely_image.json").unlink()
    put(tmp_path, "two_media")
    (tmp_path / "two_media.mp4").write_bytes(b"")
    put(tmp_path, "empty", prompt=" ")
    put(tmp_path, "number", prompt=3)
    put(tmp_path, "negative", negative_prompt=["blurry"])
    for name, text in (("list", "[]"), ("broken", '{"prompt": '), ("blank", "")):
        put(tmp_path, name)
        (tmp_path / f"{name}.json").write_text(text)
    put(tmp_path, "latin")
    (tmp_path / "latin.json").write_bytes(b'{"prompt": "caf\xe9"}')
    folder = scan(tmp_path)
    assert ids(folder) == ["good"]
    names = {reason: sorted(Path(name).name for name in names) for reason, names in folder.bad.items()}
    prompts = ["blank.json", "broken.json", "empty.json", "latin.json", "list.json", "negative.json", "number.json"]
    assert names == {
        "no_media": ["lonely_json.json"],
        "no_json": ["lonely_image.png"],
        "ambiguous": ["two_media.json"],
        "no_prompt": prompts,
    }


def test_the_allowed_share_of_bad_entries_is_allowed_and_no_more(tmp_path):
    for i in range(9):
        put(tmp_path, f"{i}")
    (tmp_path / "alone.png").write_bytes(b"")
    assert len(scan(tmp_path, 0.1).samples) == 9
    with pytest.raises(
        DataError, match=r"1 of 10 samples are invalid .* 0\.09.*alone\.png \(image or video without caption"
    ):
        scan(tmp_path, 0.09)


def test_the_message_shows_ten_of_many(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.png").write_bytes(b"")
    with pytest.raises(DataError) as raised:
        scan(tmp_path)
    assert str(raised.value).count(".png (image or video without") == 10
    assert "30 of 30" in str(raised.value)


@check_each("make", ["missing", "file", "empty"])
def test_a_folder_without_pairs_is_refused_by_name(tmp_path, make):
    path = tmp_path / "pairs"
    if make == "file":
        path.write_text("")
    elif make == "empty":
        path.mkdir()
    with pytest.raises(DataError, match=r"pairs (is not a folder|has no captioned media).*NAME\.json"):
        scan(path)


def test_split_is_disjoint_complete_and_about_the_asked_share(tmp_path):
    for i in range(300):
        put(tmp_path, f"{i:03}")
    folder = scan(tmp_path)
    training, held_out = folder.split_holdout(0.2)
    assert sorted(s.id for s in training + held_out) == ids(folder)
    assert [s.id for s in training] == sorted(s.id for s in training)
    assert 40 <= len(held_out) <= 80  # 60 expected; 35 is five standard deviations
    assert folder.split_holdout(0.0) == (folder.samples, [])


def test_a_sample_keeps_its_side_when_others_come_and_go(tmp_path):
    for i in range(100):
        put(tmp_path, f"{i:02}")
    before = {s.id for s in scan(tmp_path).split_holdout(0.3)[1]}
    for i in range(50):
        put(tmp_path, f"new{i}")
        (tmp_path / f"{i:02}.png").unlink()
    after = {s.id for s in scan(tmp_path).split_holdout(0.3)[1]}
    assert {i for i in after if not i.startswith("new")} == {i for i in before if int(i) >= 50}


@pytest.mark.parametrize("holdout", [1e-9, 1 - 1e-9])
def test_neither_side_of_a_small_folder_is_empty(tmp_path, holdout):
    put(tmp_path, "a")
    assert [len(side) for side in scan(tmp_path).split_holdout(holdout)] == [1, 0]
    put(tmp_path, "b")
    put(tmp_path, "c")
    assert sorted(len(side) for side in scan(tmp_path).split_holdout(holdout)) == [1, 2]


def test_digits_that_are_missing_are_answered_with_their_command(tmp_path):
    folder = tmp_path / "digits" / "images"
    with pytest.raises(DataError, match=f"images not found. Create it: wfm data digits {folder.parent}"):
        CaptionedFolder(folder, max_bad_fraction=0.0)
