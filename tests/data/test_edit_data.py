"""Data of editing models: source images and masks in tables, folders, tar shards, Hugging Face data sets and pairs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from commands import wfm_command
from each_case import check_each
from folders import encode_image, put, write_tar
from wfm_ds.data.hf_stream import HfStream
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre, load_image
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_ds.recipe.data import DataRecipe

show = wfm_command("data")
FOUND = {"target": 1, "source": 2, "source_2": 3, "mask": 4}  # grey level of each image of a sample
ALL = {"inputs": ["source", "source_2"], "reward_inputs": ["mask"]}
ONE = {"inputs": ["source"]}
SOURCE_READER = InputReader(input_ndims={}, num_frames=1, actions=ActionsRecipe(), validate=len, images=["source"])
SMALL = Framing(height=8, width=8)


def scan(path, kind="folder", **keys):
    return build_sample_set(DataRecipe(kind=kind, path=str(path), **keys), [str(path)])


def refusal(*args, **keys):
    with pytest.raises(DataError) as error:
        scan(*args, **keys)
    return str(error.value)


def level(media):
    """Return the grey level of an image file of one colour."""
    (value,) = np.unique(load_image(media, Framing(height=8, width=8), draw_centre))
    return int(value)


def levels(sample):
    return {"target": level(sample.media)} | {name: level(image) for name, image in sample.images.items()}


def images(**names):
    """Return {file name: image of the grey level in FOUND}. names: file name by role."""
    return {name: encode_image(FOUND[role]) for role, name in names.items()}


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


TABLE_ROW = {"prompt": "edit", "file_name": "t/1.png", "source": "./s/1.png", "source_2": "r/1.png", "mask": "m/1.png"}
TABLE_FILES = images(target="t/1.png", source="s/1.png", source_2="r/1.png", mask="m/1.png")
PAIR = {"prompt": "edit", "chosen": "t/1.png", "rejected": "b.png", "source": "s/1.png"}
LAYOUTS = {
    "table": ({}, {"metadata.jsonl": jsonl(TABLE_ROW)} | TABLE_FILES),
    "table and folders": (
        {"input_folders": {"source": "s"}},
        {"metadata.jsonl": jsonl(TABLE_ROW | {"source": "a database", "file_name": "1.png"})}
        | TABLE_FILES
        | images(target="1.png"),
    ),
    "folders": (
        {"input_folders": {"source": "s", "source_2": "r", "mask": "m"}},
        {"in/1.txt": "edit"}
        | images(target="in/1.png", source="s/in/1.webp", source_2="r/in/1.png", mask="m/in/1.png"),
    ),
    "caption files": (
        {},
        {"1.json": json.dumps({"prompt": "edit", "source": "s/1.png"})}
        | images(target="1.png", source="s/1.png", source_2="1.source_2.png", mask="1.mask.png"),
    ),
}


@check_each(("layout", "kind"), [(layout, kind) for layout in LAYOUTS for kind in ("folder", "paired")])
def test_the_images_of_a_sample_are_found_in_every_layout_of_files(tmp_path, layout, kind):
    keys, files = LAYOUTS[layout]
    if kind == "paired" and layout.startswith("table"):
        return
    folder = put(tmp_path / "set", files)
    found = scan(folder, kind, **ALL, **keys)
    (sample,) = found.samples
    assert levels(sample) == FOUND
    assert not {"source", "source_2", "mask"} & sample.prompt.metadata.keys() - keys.get("input_folders", {}).keys()
    assert found.bad == {}


def test_input_files_that_the_recipe_does_not_name_are_no_samples(tmp_path):
    names = ["source", "mask", "control", "control_mask"]
    files = {f"{i}.{name}.png": None for i in range(3) for name in names} | {f"{i}.png": None for i in range(3)}
    captions = {f"{i}.txt": "x" for i in range(3)}
    for keys in ({"inputs": ["source"]}, {"inputs": ["control"]}, {}, {"prompt": "x"}):
        folder = put(tmp_path / str(keys), files | ({} if "prompt" in keys else captions))
        found = scan(folder, **keys)
        assert [sample.id for sample in found.samples] == ["0", "1", "2"]
        assert found.bad == {}


def test_each_of_several_data_sets_names_its_input_images(tmp_path):
    put(tmp_path / "one", {"a.png": None, "a.txt": "x", "before/a.png": None})
    table = jsonl({"prompt": "x", "file_name": "a.png", "before": "b.png"})
    put(tmp_path / "two", {"metadata.jsonl": table, "a.png": None, "b.png": None})
    one = {"path": "one", "input_folders": {"source": "before"}}
    two = {"path": "two", "input_columns": {"source": "before"}}
    samples = scan(tmp_path, "sets", sets=[one, two], **ONE).samples
    files = {sample.id: sample.images["source"].path for sample in samples}
    assert files == {"one/a": tmp_path / "one/before/a.png", "two/a": tmp_path / "two/b.png"}


@check_each("kind", ["webdataset", "pairs"])
def test_tar_shards_have_input_images_as_members(tmp_path, kind):
    names = {role: f"1.{role}.png" for role in ("source", "source_2", "mask")}
    names |= {"target": "1.png"} if kind == "webdataset" else {"target": "1.chosen.png"}
    members = [("1.txt", b"edit"), *images(**names).items()]
    if kind == "pairs":
        members.append(("1.rejected.png", encode_image(9)))
    tar = write_tar(tmp_path / "a.tar", members)
    found = scan(tar, kind, **ALL)
    assert [levels(sample) for sample in found.samples] == [FOUND]
    assert scan(tar, kind).samples[0].images == {}
    lacking = write_tar(tmp_path / "b.tar", [member for member in members if member[0] != "1.source.png"])
    assert "without exactly one file for each input image" in refusal(lacking, kind, **ALL)


def test_lines_of_pairs_name_their_source(tmp_path):
    files = {"b.png": encode_image(9)} | TABLE_FILES
    folder = put(
        tmp_path, files | {"pairs.jsonl": jsonl(PAIR), "bad.jsonl": jsonl(PAIR, PAIR | {"source": "t/2.png", "id": 2})}
    )
    (sample,) = scan(folder / "pairs.jsonl", "pairs", **ONE).samples
    assert levels(sample) == {"target": 1, "source": 2}
    assert sample.prompt.metadata == {}
    put(folder, {"same.jsonl": jsonl(PAIR | {"source": PAIR["chosen"]})})  # prefers no change
    (sample,) = scan(folder / "same.jsonl", "pairs", **ONE).samples
    prompt = SOURCE_READER.load_prompt(sample, SMALL, draw_centre)
    assert np.all(prompt.inputs["source"] == FOUND["target"])
    bad = scan(folder / "bad.jsonl", "pairs", max_bad_fraction=0.5, **ONE).bad
    assert bad == {"no_source": [f"{folder}/bad.jsonl:2"]}


def rows_of_table(*columns, text="prompt"):
    return jsonl({text: "edit"} | {column: f"{column}.png" for column in columns})


COPY = "so image would be read as the edited image"
EITHER = (
    "data.target: false for RL from instruction and source alone, or name the columns file_name (edited image) and "
    "source"
)


@check_each(
    ("columns", "keys", "message"),
    [
        (("image",), {}, f"has the columns prompt, image, but no source images, {COPY}: set {EITHER}"),
        (
            ("image", "edited_image"),
            {},
            f"{COPY}: set data.image_column: edited_image and data.input_columns: {{source: image}}",
        ),
        (("image", "input_image"), {}, "set data.image_column: image and data.input_columns: {source: input_image}"),
        (
            ("image", "source", "output_image"),
            {},
            "so the content of image is uncertain: set data.image_column: output_image and data.input_columns: "
            "{source: source}",
        ),
        (
            ("image", "original_image"),
            {"target": False},
            "so the content of image is uncertain: set data.input_columns: {source: original_image}",
        ),
        (
            ("original_image", "edited_image"),
            {},
            "no source images: set data.image_column: edited_image and data.input_columns: {source: original_image}",
        ),
        (("source",), {}, "but not file_name (edited image): add it, or set data.target: false"),
        (("source",), {"reward_inputs": ["mask"], "target": False}, "but no files in mask"),
        (("file_name", "source"), {"reward_inputs": ["mask"]}, "but no files in mask: add them, or set data.input_"),
        (("image",), {"input_columns": {"source": "before"}}, "but no files in data.input_columns.source before"),
        (("image", "source"), {"image_column": "before"}, "but not data.image_column before"),
        (("image", "source"), {"image_column": "source"}, "source cannot be the edited image and an input"),
    ],
)
def test_a_table_whose_columns_do_not_show_source_and_target_is_refused(tmp_path, columns, keys, message):
    folder = put(tmp_path / "set", {"metadata.jsonl": rows_of_table(*columns)})
    put(folder, {f"{column}.png": None for column in columns})
    assert message in refusal(folder, **ONE, **keys)


@check_each(
    ("columns", "keys", "media", "source"),
    [
        (("image", "source"), {}, "image", "source"),
        (("file_name", "source", "target"), {}, "file_name", "source"),
        (
            ("image", "edited_image"),
            {"image_column": "edited_image", "input_columns": {"source": "image"}},
            "edited_image",
            "image",
        ),
        (("file_name", "source"), {"target": False}, "source", "source"),
        (("image",), {"target": False}, "image", "image"),
        (("image", "edited_image"), {"target": False}, "image", "image"),
        (
            ("image", "original_image"),
            {"target": False, "input_columns": {"source": "original_image"}},
            "original_image",
            "original_image",
        ),
    ],
)
def test_columns_decide_the_target_and_the_source(tmp_path, columns, keys, media, source):
    folder = put(tmp_path / "set", {"metadata.jsonl": rows_of_table(*columns)})
    put(folder, {f"{column}.png": None for column in columns})
    (sample,) = scan(folder, **ONE, **keys).samples
    assert (sample.media.file, sample.images["source"].file) == (f"{folder}/{media}.png", f"{folder}/{source}.png")


def test_without_targets_a_source_may_have_several_instructions(tmp_path):
    rows = [{"prompt": text, "image": "a.png"} for text in ("red", "blue")]
    folder = put(tmp_path / "set", {"metadata.jsonl": jsonl(*rows), "a.png": None})
    found = scan(folder, target=False, **ONE)
    assert {sample.id: sample.prompt.text for sample in found.samples} == {"a": "red", "a:2": "blue"}
    for name in ("a.png", "a.txt"):
        put(tmp_path / "files", {name: "red"})
    (sample,) = scan(tmp_path / "files", target=False, **ONE).samples
    assert sample.images == {"source": sample.media}
    tar = write_tar(tmp_path / "a.tar", [("a.png", b""), ("a.txt", b"red"), ("b.source.png", b""), ("b.txt", b"blue")])
    for sample in scan(tar, "webdataset", target=False, **ONE).samples:
        assert sample.images == {"source": sample.media}


def test_samples_without_their_input_images_are_counted(tmp_path):
    rows = [{"prompt": "edit", "file_name": f"{i}.png", "source": f"s{i}.png"} for i in range(3)]
    folder = put(tmp_path / "table", {"metadata.jsonl": jsonl(*rows, {"prompt": "edit", "file_name": "3.png"})})
    put(folder, {f"{i}.png": None for i in range(4)} | {"s0.png": None, "s2.txt": None})
    found = scan(folder, max_bad_fraction=0.75, **ONE)
    assert [sample.id for sample in found.samples] == ["0"]
    assert found.bad == {"no_source": [f"metadata.jsonl line {i + 1}: {i}.png" for i in (1, 2, 3)]}

    folder = put(tmp_path / "files", {f"{i}.{suffix}": "edit" for i in range(3) for suffix in ("png", "txt")})
    put(folder, {"control/0.jpg": None, "control/1.png": None, "control/1.jpg": None})
    keys = ONE | {"input_folders": {"source": folder / "control"}}
    found = scan(folder, max_bad_fraction=0.75, **keys)
    assert [sample.images["source"].file for sample in found.samples] == [f"{folder}/control/0.jpg"]
    assert found.bad == {"no_source": [f"{folder}/{i}.png" for i in (1, 2)]}
    assert refusal(folder, **keys).startswith(f"{folder}: 2 of 3 samples are invalid")
    message = refusal(put(tmp_path / "none", {"a.png": None, "a.txt": "a"}), **ONE)
    assert message.endswith("for RL from instruction and source alone set data.target: false")


@check_each(
    ("keys", "message"),
    [
        ({"input_folders": {"source": "none"}}, "data.input_folders.source: DIR/none is not a folder"),
        ({"input_folders": {"source": "../set"}}, "data.input_folders.source: DIR/../set contains the edited images"),
    ],
)
def test_keys_that_do_not_fit_the_folder_are_refused(tmp_path, keys, message):
    folder = put(tmp_path / "set", {"a.png": None, "a.txt": "a"})
    assert message in refusal(folder, **ONE, **keys).replace(str(folder), "DIR")


def test_layouts_without_a_place_for_the_images_are_refused(tmp_path):
    folder = put(tmp_path / "set", {"images/a.png": None, "metas/a.txt": "a"})
    assert "data.inputs cannot name images of this layout (metas/*.txt and images/)" in refusal(folder, **ONE)
    tar = write_tar(tmp_path / "tar" / "a.tar", [("a.png", b""), ("a.txt", b"x"), ("a.source.png", b"")])
    keys = ONE | {"input_folders": {"source": tmp_path / "set"}}
    assert "data.input_folders cannot name images of this layout (only tar files: 1)" in refusal(tar.parent, **keys)


def test_an_image_that_is_its_own_source_and_a_damaged_source_are_rejected(tmp_path, monkeypatch):
    """Both names of the file must be equal, whatever the spelling."""
    table = {"metadata.jsonl": jsonl({"prompt": "x", "file_name": "a.png", "source": "./t/../a.png"})}
    caption = {"a.json": json.dumps({"prompt": "x", "source": "./a.png"})}
    put(tmp_path, {"t/b.png": None})
    monkeypatch.chdir(tmp_path)
    for name, files in (("table", table), ("caption", caption)):
        put(tmp_path / name, files | {"a.png": encode_image(1)})
        for folder in (tmp_path / name, name, f"t/../{name}"):
            assert "1 of 1 samples are invalid" in (message := refusal(folder, **ONE))
            assert "(an input image or video is the target itself, so the model would learn to copy)" in message
    put(tmp_path / "table", {"b.png": encode_image(2)})
    rows = [{"prompt": "x", "file_name": f"{name}.png", "source": "a.png"} for name in "ab"]
    put(tmp_path / "table", {"metadata.jsonl": jsonl(*rows)})
    found = scan(tmp_path / "table", max_bad_fraction=0.5, **ONE)
    assert [sample.id for sample in found.samples] == ["b"]
    assert found.bad == {"same_file": ["metadata.jsonl line 1: a.png"]}
    own = replace(found.samples[0], images={"source": found.samples[0].media})  # as from a user kind
    with pytest.raises(BadMedia, match=r"source: .*the target itself.*\(bad_input\)"):
        SOURCE_READER.load_prompt(own, SMALL, draw_centre)
    put(tmp_path / "damaged", {"a.png": encode_image(1), "a.txt": "x", "a.source.png": "no image"})
    (sample,) = scan(tmp_path / "damaged", **ONE).samples
    with pytest.raises(BadMedia) as error:
        SOURCE_READER.load_prompt(sample, SMALL, draw_centre)
    assert error.value.reason == "bad_input"


def test_targets_are_not_decoded_if_only_prompts_and_inputs_are_read(tmp_path):
    put(tmp_path, {"a.png": "no image", "a.txt": "x", "a.source.png": encode_image(2)})
    keys = {"global_batch": 1, "seed": 0, "shuffle": False, "max_bad_fraction": 1, "framings": [SMALL]}
    keys |= {"inputs": SOURCE_READER, "cached_latents": lambda media, framing: media.missing}
    reader = BatchSource(scan(tmp_path, **ONE).samples, **keys, reads_media=False)
    (sample,) = reader.read_batch(1, 0, 1)
    reader.close()
    assert (sample.pixels, sample.latents, sum(reader.bad.values())) == (None, None, 0)
    assert np.all(sample.prompt.inputs["source"] == 2)


def test_a_table_in_the_current_folder_is_read(tmp_path, monkeypatch):
    put(tmp_path, {"metadata.jsonl": rows_of_table("file_name", "source"), "file_name.png": None, "source.png": None})
    monkeypatch.chdir(tmp_path)
    (sample,) = scan(".", **ONE).samples
    assert (sample.media.file, sample.images["source"].file) == ("file_name.png", "source.png")


@pytest.fixture
def hub_set(tmp_path, monkeypatch):
    """A folder with parquet shards that have the columns of InstructPix2Pix."""
    hf = pytest.importorskip("datasets")
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    columns = {"original_image": "source", "edited_image": "target", "mask": "mask"}
    values = {name: [{"bytes": encode_image(FOUND[role]), "path": None}] for name, role in columns.items()}
    values |= {"original_image": [*values["original_image"], None]}
    values |= {name: values[name] * 2 for name in ("edited_image", "mask")}
    features = hf.Features(dict.fromkeys(columns, hf.Image()) | {"edit_prompt": hf.Value("string")})
    path = tmp_path / "set"
    (path / "data").mkdir(parents=True)
    rows = hf.Dataset.from_dict(values | {"edit_prompt": ["edit", "edit"]}, features=features)
    rows.to_parquet(path / "data" / "train-00000-of-00001.parquet")
    return path


HUB_KEYS = {
    **ONE,
    "reward_inputs": ["mask"],
    "caption_column": "edit_prompt",
    "image_column": "edited_image",
    "input_columns": {"source": "original_image"},
}


def test_columns_of_hugging_face_data_sets_are_input_images(hub_set, tmp_path, capsys):
    hf = pytest.importorskip("datasets")
    expected = {"target": 1, "source": 2, "mask": 4}
    found = scan(hub_set, "hf", max_bad_fraction=0.5, **HUB_KEYS)
    assert [levels(sample) for sample in found.samples] == [expected]
    assert found.bad == {"no_source": [f"{hub_set} train/000000001"]}
    assert len({media.identity() for media in (found.samples[0].media, *found.samples[0].images.values())}) == 3
    assert scan(hub_set, max_bad_fraction=0.5, **HUB_KEYS).samples == found.samples

    (row,) = HfStream(DataRecipe(kind="hf", path=str(hub_set), streaming=True, shuffle=False, **HUB_KEYS)).read(1)
    assert levels(row.sample) == expected
    # Equal images in two columns of a row are two files, streamed or not.
    twice = {"inputs": ["source"], "caption_column": "text", "image_column": "image"}
    features = hf.Features({"image": hf.Image(), "source": hf.Image(), "text": hf.Value("string")})
    same = {"bytes": encode_image(1), "path": None}
    (tmp_path / "equal").mkdir()
    equal = hf.Dataset.from_dict({"image": [same], "source": [same], "text": ["x"]}, features=features)
    equal.to_parquet(tmp_path / "equal" / "train.parquet")
    (sample,) = scan(tmp_path / "equal", "hf", **twice).samples
    twice |= {"kind": "hf", "path": str(tmp_path / "equal"), "streaming": True, "shuffle": False}
    (row,) = HfStream(DataRecipe(**twice)).read(1)
    assert levels(sample) == levels(row.sample) == {"target": 1, "source": 1}
    SOURCE_READER.load_prompt(row.sample, SMALL, draw_centre)
    without = HUB_KEYS | {"target": False, "image_column": None}
    (sample,) = scan(hub_set, "hf", max_bad_fraction=0.5, **without).samples
    assert levels(sample) == {"target": 2, "source": 2, "mask": 4}

    keys = HUB_KEYS | {"input_columns": {}}
    advice = "data.image_column: edited_image and data.input_columns: {source: original_image}"
    for changes in ({}, {"image_column": None}):
        assert f"but no source images: set {advice}" in refusal(hub_set, **keys | changes)
    assert show([str(hub_set)]) == 2
    assert f"for edits set data.inputs: [source], {advice}" in capsys.readouterr().err


def test_the_command_counts_the_input_images_of_a_folder(tmp_path, capsys):
    folder = put(tmp_path / "files", {f"{i}.{suffix}": "edit" for i in range(2) for suffix in ("png", "txt")})
    put(folder, {"0.source.png": None, "1.source.png": None, "0.mask.png": None})
    tar = write_tar(tmp_path / "tar" / "a.tar", [("a.png", b""), ("a.txt", b"x"), ("a.source.png", b"")])
    table = put(tmp_path / "table", {"metadata.jsonl": rows_of_table("image", "edited_image", "mask")})
    put(table, {f"{column}.png": None for column in ("image", "edited_image", "mask")})
    for path, line in (
        (folder, "inputs     1 mask, 2 source; to use them, set data.inputs: [source]"),
        (tar.parent, "inputs     1 source; to use them, set data.inputs: [source]"),
        (
            table,
            "note       for edits set data.inputs: [source], data.image_column: edited_image and data.input_columns: "
            "{source: image}",
        ),
    ):
        assert show([str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert line in lines
        assert not any(one.startswith("skipped") for one in lines)
    row = {"prompt": "x", "file_name": "a.png", "source": "a.png"}  # valid without targets
    assert show([str(put(tmp_path / "same", {"metadata.jsonl": jsonl(row), "a.png": None}))]) == 0
