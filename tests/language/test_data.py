"""Conversations of a recipe and the packed rows of its steps: bad rows are dropped and counted, up to a limit."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import s3
from each_case import check_each
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.distributed import progress
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError, UserError
from wfm_ds.language import model as language_model
from wfm_ds.language.annotations import REASONS, parse_conversation
from wfm_ds.language.data import LanguageData, common_folder, load_conversations
from wfm_ds.language.packed_sequences import ConversationReader
from wfm_ds.language.sequence_source import SequenceSource
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.recipe import file as recipe_file
from wfm_ds.training.language_builder import make_row_order, make_sample_reader
from wfm_ds.training.preflight import check_run

ALONE = World.single_process()


@pytest.fixture(scope="module")
def tiny():
    return language_model.load_language_model(str(get_tiny_folder("qwen25vl")), torch.float32)


@pytest.fixture
def squares(tmp_path):
    write_squares(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def load(root, tiny, squares):
    """`load(*overrides)`: return the recipe, its reader and its data."""

    def load(*overrides):
        places = [f"data.path={squares}/annotations.json", f"data.media_path={squares}", f"model.path={tiny.path}"]
        recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "reason_llava_sft.yaml", [*places, *overrides])
        reader = make_sample_reader(recipe, tiny)
        return recipe, reader, load_conversations(recipe, reader, ALONE)

    return load


def spoil(squares):
    """Make one row bad for each reason, and return the paths of two images with intact headers and damaged pixels."""
    file = squares / "annotations.json"
    rows = json.loads(file.read_text())
    rows[0] = {"id": "zero"}
    rows[2]["conversations"] = []
    rows[4]["conversations"][0]["from"] = "robot"
    del rows[6]["image"]
    (squares / "images" / "009.png").unlink()  # the image of row 9, and the second image of row 8
    rows[10]["conversations"][1]["value"] = "red " * 200
    file.write_text(json.dumps(rows))


def test_bad_rows_are_left_out_and_counted_by_reason(load, squares, caplog):
    spoil(squares)
    _, _, data = load("data.max_bad_fraction=0.2", "validation.holdout=0")
    counts = {"row": 1, "no_answer": 1, "turn": 1, "no_media": 1, "media": 2, "too_long": 1}
    assert data.bad == counts
    assert counts.keys() == REASONS.keys()
    assert len(data.training.conversations) == 40 - 7
    for reason, count in counts.items():
        (line,) = [message for message in caplog.messages if REASONS[reason] in message]
        assert f"skipped {count} of 40 rows" in line
    with pytest.raises(DataError, match=r"7 of 40 rows are invalid \(data\.max_bad_fraction: 0\.1\)"):
        load("data.max_bad_fraction=0.1")


def test_ids_and_held_out_conversations_do_not_depend_on_the_folder(load, squares, tmp_path):
    elsewhere = tmp_path / "a" / "copy"
    shutil.copytree(squares, elsewhere)
    here, there = (load(f"data.path={folder}", f"data.media_path={folder}")[2] for folder in (squares, elsewhere))
    held_out = [[conversation.id for conversation in data.held_out.conversations] for data in (here, there)]
    assert held_out[0] == held_out[1] != []
    assert all(name.startswith("annotations.json[") for name in held_out[0])


@check_each(
    ("files", "folder"),
    [
        (["/a/b.json"], "/a/"),
        (["/a/b/c.json", "/a/bc/c.json"], "/a/"),
        (["s3://b/x/a.json", "s3://b/y/a.json"], "s3://b/"),
        (["a.json", "/a.json"], ""),
        (["a.json"], ""),
    ],
)
def test_the_common_folder_of_files(files, folder):
    assert common_folder(files) == folder


def test_measured_lengths_equal_the_lengths_read_later(load):
    _, reader, data = load()
    for conversation, length in list(zip(data.training.conversations, data.training.lengths, strict=True))[:8]:
        assert len(reader.read(conversation).tokens) == length
    assert data.media_kinds == {"image"}


def test_lengths_are_measured_once(load, squares, tmp_path, monkeypatch):
    """Lengths are cached, except for rows with failed measurements; other settings are measured again."""
    spoil(squares)
    options = ("data.max_bad_fraction=0.2", "validation.holdout=0", f"data.cache_dir={tmp_path / 'cache'}")
    _, _, data = load(*options)
    measured = []
    whole = ConversationReader.measure
    monkeypatch.setattr(ConversationReader, "measure", lambda self, one: measured.append(one.id) or whole(self, one))
    _, _, again = load(*options)
    assert len(measured) == sum(data.bad[reason] for reason in ("media", "too_long")) == 3
    assert (again.training.sizes, again.bad) == (data.training.sizes, data.bad)
    load(*options, "data.pixels.max=3136")
    assert len(measured) > 30
    assert len(list((tmp_path / "cache" / "lengths").iterdir())) == 2


def test_reading_and_counting_show_their_progress(load, squares, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    file = squares / "annotations.json"
    rows = json.loads(file.read_text())
    (squares / "rows").mkdir()
    (squares / "rows" / "lines.jsonl").write_text("\n".join(map(json.dumps, rows[:3])) + "\n\n")
    (squares / "rows" / "list.json").write_text(json.dumps(rows[3:8]))
    load(f"data.path={squares}/rows", "validation.holdout=0")
    shown = capsys.readouterr().err.splitlines()
    lines = [f"reading {squares}/rows/lines.jsonl: 3 of 3", f"reading {squares}/rows/list.json: 5 of 5"]
    for line in (*lines, "reading annotations: 2 of 2", "counting tokens: 8 of 8"):
        assert f"{line}, 0:00 left" in shown


@pytest.mark.slow
def test_annotations_and_media_can_be_on_s3(load, squares, s3_server, s3_proxy):
    client, (_, _, here) = s3_server[1], load()
    rows = json.loads((squares / "annotations.json").read_text())
    for name, part in (("a.json", json.dumps(rows[:30])), ("b.jsonl", "\n".join(map(json.dumps, rows[30:])))):
        client.put_object(Bucket=s3.BUCKET, Key=f"llava/{name}", Body=part.encode())
    for picture in (squares / "images").iterdir():
        client.put_object(Bucket=s3.BUCKET, Key=f"media/images/{picture.name}", Body=picture.read_bytes())
    address = f"s3://{s3.BUCKET}"
    _, reader, there = load(f"data.path={address}/llava/", f"data.media_path={address}/media", "validation.holdout=0")
    assert sorted(there.training.lengths) == sorted([*here.training.lengths, *here.held_out.lengths])
    conversation = there.training.conversations[0]
    assert conversation.media[0].address == f"{address}/media/images/000.png"
    ((_, pixels), *_) = reader.read(conversation).pixels
    local = parse_conversation(rows[0], "0", root=str(squares))
    assert np.array_equal(pixels.patches, reader.read(local).pixels[0][1].patches)
    client.delete_object(Bucket=s3.BUCKET, Key="media/images/001.png")
    missing = "data.max_bad_fraction=0.1"
    _, _, without = load(
        f"data.path=[{address}/llava/a.json, {address}/llava/b.jsonl]", f"data.media_path={address}/media", missing
    )
    assert without.bad["media"] == 2  # rows 0 and 1 contain it
    with pytest.raises(UserError, match=r"s3://shards/none\.json: cannot be read"):
        load(f"data.path={address}/none.json")


def test_held_out_conversations_are_the_same_in_every_run_and_not_trained(load, squares):
    _, _, data = load("validation.holdout=0.2", "validation.num_images=100")
    training, held_out = ({c.id for c in part.conversations} for part in (data.training, data.held_out))
    assert len(training | held_out) == 40
    assert not training & held_out
    assert 0 < len(held_out) < 20
    again = load("validation.holdout=0.2", "validation.num_images=3", "run.seed=7")[2].held_out
    assert [c.id for c in again.conversations] == sorted(held_out)[:3]
    _, _, data = load(f"validation.path={squares}/annotations.json", "validation.num_images=5")
    assert (len(data.training.lengths), len(data.held_out.lengths)) == (40, 5)


def source_of(load, *overrides):
    recipe, reader, data = load("validation.holdout=0", *overrides)
    return SequenceSource(data, make_row_order(recipe, data), reader, sequences_per_step=6, workers=2), data


def ids(step):
    return [[sample.id for sample in row] for row in step.sequences]


def test_rows_of_a_step_are_the_same_for_any_number_of_ranks(load):
    source, data = source_of(load)
    whole = [ids(source.read_step(step, 0, 1)) for step in (1, 2, 3)]
    for ranks in (2, 3):
        shares = [source_of(load)[0] for _ in range(ranks)]
        for step, rows in enumerate(whole, 1):
            parts = [ids(share.read_step(step, rank, ranks)) for rank, share in enumerate(shares)]
            assert [parts[k % ranks][k // ranks] for k in range(6)] == rows
    late = source_of(load)[0]
    assert ids(late.read_step(3, 0, 1)) == whole[2]  # no step depends on earlier steps
    assert isinstance(data, LanguageData)


def test_media_that_break_later_are_left_out_of_their_rows(load, squares):
    source, _ = source_of(load, "data.pack=false", "data.shuffle=false")
    whole = (squares / "images" / "001.png").read_bytes()
    (squares / "images" / "001.png").write_bytes(whole[: len(whole) - 40])  # the header is unchanged
    Image.new("RGB", (112, 112)).save(squares / "images" / "004.png")  # of another size
    step = source.read_step(1, 0, 1)
    assert [len(row) for row in step.sequences] == [0, 0, 1, 1, 0, 1]  # rows 0 and 1 contain image 1
    assert (step.num_bad, step.num_tried) == (3, 6)
    source.check_bad_fraction(step.num_bad, step.num_tried, 0.05)
    assert source.state_dict() == {"bad": 3, "tried": 6}
    with pytest.raises(DataError, match=r"9 of 12 conversations have unreadable images or videos"):
        source.check_bad_fraction(6, 6, 0.05)
    source.close()


def test_the_report_of_a_check(load, root, squares, tiny, tmp_path):
    recipe, _, data = load(f"run.output_dir={tmp_path / 'out'}")
    lines = str(check_run(recipe, 1))
    assert f"{len(data.training.lengths)} conversations, {len(data.held_out.lengths)} held out, 0 left out" in lines
    assert lines.endswith("all checks passed")
    assert not (tmp_path / "out").exists()
