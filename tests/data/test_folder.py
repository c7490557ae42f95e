"""Automatic folder recognition: the detected layout, the captions, and the error for each near miss."""

import json
import subprocess
import sys

import pytest

from commands import wfm_command
from each_case import check_each
from folders import put, sft_recipe, write_tar
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.datasets import load_data
from wfm_ds.data.folder import load_folder
from wfm_ds.data.folder_layout import detect_layout
from wfm_ds.data.webdataset import TarShards
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe

show, write_captions = wfm_command("data"), wfm_command("data captions")


def settings(folder, **keys):
    return DataRecipe(kind="folder", path=str(folder), cache_dir=folder.parent / "cache", **keys)


def scan(folder, **keys):
    return load_folder(settings(folder, **keys), folder)


def test_shards_in_a_folder_are_read_like_shards_of_their_own_kind(tmp_path):
    write_tar(tmp_path / "shards" / "000.tar", [("a.png", b""), ("a.txt", b"a")])
    of_kind = TarShards([str(tmp_path / "shards" / "*.tar")], cache_dir=None, max_bad_fraction=0)
    assert scan(tmp_path / "shards").samples == of_kind.samples
    assert [sample.id for sample in of_kind.samples] == ["shards/000/a"]


def captions(found):
    return {sample.id: (sample.prompt.text, dict(sample.prompt.metadata)) for sample in found.samples}


def refusal(folder, **keys):
    with pytest.raises(DataError) as raised:
        scan(folder, **keys)
    return str(raised.value)


@check_each(
    ("files", "reading"),
    [
        ({"metas/a.txt": "x", "videos/a.mp4": None}, "cosmos"),
        ({"metas/a.txt": "x", "images/a.png": None, "metadata.jsonl": "{}"}, "cosmos"),
        ({"metas/a.json": "{}", "videos/a.mp4": None}, "media"),
        ({"0.tar": None, "1.TAR": None, ".hidden": None}, "webdataset"),
        ({"0.tar": None, "a.png": None}, "media"),
        ({"metadata.csv": "file_name,text\n", "state.json": "{}", "dataset_info.json": "{}"}, "table"),
        ({"train/metadata.jsonl": "{}", "train/a.png": None}, "table"),
        ({"state.json": "{}", "dataset_info.json": "{}", "data-0.arrow": None}, "hf"),
        ({"data/train-00000-of-00001.parquet": None, "README.md": None}, "hf"),
        ({"a.png": None, "a.txt": "x"}, "media"),
        ({}, "media"),
    ],
)
def test_the_first_matching_rule_decides_the_layout_of_a_folder(tmp_path, files, reading):
    folder = put(tmp_path / "set", files)
    folder.mkdir(exist_ok=True)
    assert detect_layout(folder).kind == reading


def test_text_beside_media_is_the_caption_and_a_prompt_in_a_json_goes_before_it(tmp_path):
    folder = put(
        tmp_path / "set",
        {
            "a.png": None,
            "a.txt": b"\xef\xbb\xbf  a red\r\n\r\n square \n",
            "deep/b.MP4": None,
            "deep/b.TXT": "a clip",
            "c.png": None,
            "c.caption": "a cat",
            "d.png": None,
            "d.txt": "not this one",
            "d.json": json.dumps({"prompt": "from json", "shot": 1}),
            "e.png": None,
            "e.txt": "a boat",
            "e.json": json.dumps({"width": 64}),
        },
    )
    expected = {
        "a": ("a red square", {}),
        "c": ("a cat", {}),
        "d": ("from json", {"shot": 1}),
        "deep/b": ("a clip", {}),
        "e": ("a boat", {"width": 64}),
    }
    # the second scan reads the cache
    for found in (scan(folder), scan(folder), CaptionedFolder(folder, max_bad_fraction=0)):
        assert captions(found) == expected
        assert found.bad == {}


def test_text_that_cannot_be_a_caption_is_counted_and_notes_are_not(tmp_path):
    names = [f"{i:02}" for i in range(40)]
    folder = put(tmp_path / "set", {f"{n}.png": None for n in names} | {f"{n}.txt": f"number {n}" for n in names})
    put(folder, {"latin.png": None, "latin.txt": b"caf\xe9", "two.png": None, "two.txt": "x", "two.caption": "y"})
    found = scan(folder)
    assert {why: [name.rpartition("/")[2] for name in names] for why, names in found.bad.items()} == {
        "no_prompt": ["latin.txt"],
        "ambiguous": ["two.caption"],
    }
    put(folder, {"gone.txt": "of an image that was removed"})
    assert [name.rpartition("/")[2] for name in scan(folder, max_bad_fraction=0.1).bad["no_media"]] == ["gone.txt"]
    put(folder, {"00.json": '{"prompt": "x"}'})  # in a folder with JSON captions, a text file without media is a note
    assert "no_media" not in scan(folder, max_bad_fraction=0.1).bad


def test_media_without_captions_get_the_prompt_of_the_recipe(tmp_path):
    folder = put(tmp_path / "set", {"a.png": None, "b.png": None, "b.txt": "its own", "c.png": None, "c.txt": " "})
    found = scan(folder, prompt="a photo of sks dog", max_bad_fraction=0.5)
    assert captions(found) == {"a": ("a photo of sks dog", {}), "b": ("its own", {})}
    assert found.notes == ["1 files without a caption use data.prompt"]
    assert list(found.bad) == ["no_prompt"]


TABLES = {
    "metadata.jsonl": '{"file_name": "a.png", "text": "a cat",\r"shot": 1}\n\n{"file_name": "in/b.mp4", "text": "b"}\n',
    "metadata.csv": "\ufefffile_name,text\na.png,a cat\nin/b.mp4,b\n",
}


@check_each("name", TABLES)
@check_each("top", ["", "train/"])
def test_a_table_gives_captions_and_the_ids_that_files_beside_them_would_have(tmp_path, name, top):
    folder = put(tmp_path / "set", {f"{top}{name}": TABLES[name], f"{top}a.png": None, f"{top}in/b.mp4": None})
    found = scan(folder)
    metadata = {"shot": 1} if name.endswith("jsonl") else {}
    assert captions(found) == {"a": ("a cat", metadata), "in/b": ("b", {})}
    assert [sample.media.path for sample in found.samples] == [folder / top / "a.png", folder / top / "in/b.mp4"]


def test_a_parquet_table_is_read_alike(tmp_path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder = put(tmp_path / "set", {"a.png": None})
    table = pa.table({"file_name": ["a.png"], "text": ["a cat"], "shot": [1], "raw": [b"\x00"]})
    parquet.write_table(table, folder / "metadata.parquet")
    assert captions(scan(folder)) == {"a": ("a cat", {"shot": 1})}
    (folder / "metadata.parquet").write_bytes(b"PAR1 but no more")
    assert refusal(folder).startswith(f"{folder}/metadata.parquet cannot be read")


def test_columns_may_have_other_names_and_files_other_places(tmp_path):
    put(tmp_path, {"other/c.png": None})
    rows = [
        {"image_path": "a.png", "caption": "short", "long": "a long one", "negative_prompt": "blurry"},
        {"image_path": "../other/c.png", "caption": "elsewhere", "long": "far away"},
    ]
    folder = put(tmp_path / "set", {"metadata.jsonl": "\n".join(map(json.dumps, rows)), "a.png": None})
    found = scan(folder)
    assert captions(found) == {
        "a": ("short", {"long": "a long one"}),
        "../other/c": ("elsewhere", {"long": "far away"}),
    }
    assert {sample.id: sample.prompt.negative_text for sample in found.samples}["a"] == "blurry"
    assert found.notes == ["metadata.jsonl lists 1 files outside of " + str(folder) + ", first: ../other/c.png"]
    assert captions(scan(folder, caption_column="long"))["a"] == ("a long one", {"caption": "short"})


def test_lines_that_cannot_be_used_are_counted(tmp_path):
    rows = [{"file_name": f"{i}.png", "text": "x"} for i in range(20)]
    rows += [{"file_name": "0.png", "text": "again"}, {"file_name": "1.heic", "text": "x"}, {"file_name": "2.png"}]
    folder = put(tmp_path / "set", {"metadata.jsonl": "\n".join(map(json.dumps, rows)), "1.heic": None})
    put(folder, {f"{i}.png": None for i in range(20)})
    assert scan(folder, max_bad_fraction=0.5).bad == {
        "ambiguous": ["metadata.jsonl line 21: 0.png"],
        "no_media": ["metadata.jsonl line 22: 1.heic"],
        "no_prompt": ["metadata.jsonl line 23: 2.png"],
    }


SEE = " (see docs/data.md)"
MANY = {f"{i:02}.png": None for i in range(12)}
NEAR_MISSES = {
    "no captions": (
        MANY,
        "DIR: 12 images without captions. Put NAME.txt next to each, set data.prompt to one caption for all, or: "
        'wfm data captions DIR --prompt "..."',
    ),
    "captions for some": (
        MANY | {"x.mp4": None, "y.png": None, "y.txt": "y"},
        "DIR: 13 of 14 media have no NAME.txt or NAME.json (00.png, 01.png, 02.png). Write them, remove the media, or "
        "set data.prompt for the rest",
    ),
    "other names": (
        {"img_1.png": None, "img_2.png": None, "caption_1.txt": "a", "caption_2.txt": "b"},
        "DIR: 2 images and 2 .txt files have no names in common (img_1.png, caption_1.txt). Put each caption next to "
        "its image, with the same name",
    ),
    "a folder beside": (
        {"images/1.png": None, "images/2.png": None, "labels/1.txt": "a"},
        "DIR: 2 images and 1 .txt files have no names in common (images/1.png, labels/1.txt). Put each caption next to "
        "its image, with the same name",
    ),
    "a column": (
        {"metadata.jsonl": '{"file_name": "a.png", "label": 3}', "a.png": None},
        "metadata.jsonl has the columns file_name, label, but not text, prompt or caption; set data.caption_column",
    ),
    "no file column": (
        {"metadata.csv": "path,text\na.png,x\n", "a.png": None},
        "metadata.csv has the columns path, text, but not file_name; rename the column with the file paths",
    ),
    "a missing file": (
        {"metadata.jsonl": '{"file_name": "b.png", "text": "x"}\n{"file_name": "a.png", "text": "x"}', "b.png": None},
        "metadata.jsonl line 2: a.png not found in DIR",
    ),
    "videos alone": (
        {"videos/a.mp4": None, "videos/b.mp4": None},
        'DIR has videos/ but no metas/. Create metas/NAME.txt: wfm data captions DIR --layout cosmos --prompt "..."',
    ),
    "unread": (
        {"a.heic": None, "b.HEIC": None, "c.gif": None},
        "DIR: 2 .heic files, an unsupported format. Convert to .png or .jpg",
    ),
    "inner tars": (
        {"shards/0.tar": None, "README.md": "x"},
        "DIR has no images or videos, but a tar file DIR/shards/0.tar: set data.path to its folder",
    ),
    "a LeRobot dataset": (
        {
            "meta/info.json": "{}",
            "data/chunk-000/episode_0.parquet": None,
            "videos/chunk-000/front/episode_0.mp4": None,
        },
        "DIR is a LeRobot dataset: set data.kind: lerobot (docs/robots.md)",
    ),
    "conversations and their images": (
        {"all.json": '[{"conversations": []}]', "images/a.png": None, "images/b.png": None},
        "DIR/all.json contains conversations: set data.kind: llava and data.path to this file, as in the recipe "
        "reason_llava_sft (docs/reasoner.md)",
    ),
    "conversations alone": (
        {"all.jsonl": '{"messages": []}'},
        "DIR/all.jsonl contains conversations: set data.kind: llava and data.path to this file, as in the recipe "
        "reason_llava_sft (docs/reasoner.md)",
    ),
    "a caption with a key of conversations": (  # belongs to an image
        {"a.json": '{"prompt": "a cat", "messages": []}'} | dict.fromkeys(("a.png", "b.png", "c.png", "d.png")),
        "DIR: 3 of 4 images have no NAME.txt or NAME.json (b.png, c.png, d.png). Write them, remove the images, or set "
        "data.prompt for the rest",
    ),
    "another dataset": (
        {"videos/a.mp4": None, "videos/b.mp4": None, "episodes.h5": None},
        "DIR: 2 videos without captions, and the layout is unknown (episodes.h5 is not a caption). The layouts are in "
        "docs/data_layouts.md",
    ),
    "nothing": ({"README.md": "x"}, "DIR has no images or videos: put NAME.txt next to each NAME.png or NAME.mp4"),
}


@check_each("name", NEAR_MISSES)
def test_a_near_miss_is_refused_with_the_files_found(tmp_path, name):
    files, sentence = NEAR_MISSES[name]
    folder = put(tmp_path / "set", files)
    assert refusal(folder).replace(str(folder), "DIR").removesuffix(SEE) == sentence


def test_a_missing_folder_is_named(tmp_path):
    assert refusal(tmp_path / "none").startswith(
        f"{tmp_path}/none not found. For a dataset of the Hugging Face Hub set data.kind: hf"
    )
    digits = tmp_path / "digits"
    assert refusal(digits) == f"{digits} not found. Create it: wfm data digits {digits}"
    file = put(tmp_path, {"file": "x"}) / "file"
    assert refusal(file) == f"{file} is a file: data.kind folder needs a folder in data.path"
    file = put(tmp_path, {"rows.json": '[{"id": 1, "conversations": []}]'}) / "rows.json"
    assert refusal(file).startswith(f"{file} contains conversations: set data.kind: llava")


@check_each(
    ("layout", "files", "written"),
    [
        ("txt", {"a.png": None, "in/b.mp4": None}, ["a.txt", "in/b.txt"]),
        ("json", {"a.png": None}, ["a.json"]),
        ("cosmos", {"videos/a.mp4": None, "images/in/b.png": None}, ["metas/a.txt", "metas/in/b.txt"]),
    ],
)
def test_captions_are_written_in_the_requested_layout(tmp_path, capsys, layout, files, written):
    folder = put(tmp_path / "set", files)
    assert write_captions([str(folder), "--prompt", "a\ncat", "--layout", layout]) == 0
    assert all((folder / name).is_file() for name in written)
    text = "a\ncat" if layout == "json" else "a cat"
    assert {text for text, _ in captions(scan(folder)).values()} == {text}
    assert write_captions([str(folder), "--prompt", "b", "--layout", layout]) == 2
    assert f"{len(written)} captions exist" in capsys.readouterr().err


def test_a_layout_without_captions_is_refused(tmp_path, capsys):
    folder = put(tmp_path / "set", {"a.mp4": None, "t.csv": "file,prompt,shot\na.mp4,x,3\n"})
    assert write_captions([str(folder), "--prompt", "x", "--layout", "cosmos"]) == 2
    assert f"{folder}/a.mp4: a Cosmos folder has videos in {folder}/videos" in capsys.readouterr().err
    assert write_captions([str(folder), "--from", str(folder / "t.csv"), "--layout", "txt"]) == 2
    assert "--layout txt stores only captions, but the table also has shot: use json" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["a.mp4", "t.csv"]


def test_a_command_shows_what_was_recognised(tmp_path, capsys):
    folder = put(tmp_path / "set", {"a.png": None, "a.txt": "caf\xe9", "b.mp4": None})
    assert show([str(folder), "--prompt", "a photo"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: images or videos with caption files (default layout)",
        "samples    1 images, 1 videos",
        "note       1 files without a caption use data.prompt",
        'a: "caf\xe9"',
        'b: "a photo"',
    ]
    assert show([str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder}: 1 of 2 media have no NAME.txt or NAME.json (b.mp4)")


def test_the_command_starts_without_torch(tmp_path):
    code = "import sys, wfm_ds.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_reads_a_folder_and_says_what_it_did(tmp_path, caplog):
    folder = put(tmp_path / "set", {"a.png": None, "b.png": None, "b.txt": "b"})
    data = load_data(sft_recipe(settings(folder, prompt=" a ").model_dump(), holdout=0.0))
    assert [prompt.text for prompt in data.validation_prompts] == [" a ".strip(), "b"]
    assert "1 files without a caption use data.prompt" in caplog.text
