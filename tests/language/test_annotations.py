"""Annotation files in the LLaVA and messages formats, and the error for each kind of bad row."""

import json
import os

import pytest

from each_case import check_each
from wfm_ds.errors import DataError
from wfm_ds.language.annotations import (
    BadConversation,
    MediaReference,
    Turn,
    annotation_files,
    parse_conversation,
    read_rows,
)


def said(*values, **more):
    """Return a LLaVA row; human and gpt alternate."""
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": v} for i, v in enumerate(values)], **more}


def image(path):
    return MediaReference("image", path)


def test_tags_give_the_positions_of_media():
    row = said("<image> beside <image>, in <video>\n?", "yes", "and?", "no", image=["/a.png", "/b.png"], video="/c.mp4")
    conversation = parse_conversation({**row, "id": 7}, "f.json[0]")
    assert conversation.id == "f.json[0]#7"
    first = (image("/a.png"), " beside ", image("/b.png"), ", in ", MediaReference("video", "/c.mp4"), "\n?")
    assert conversation.turns == (
        Turn("user", first),
        Turn("assistant", ("yes",)),
        Turn("user", ("and?",)),
        Turn("assistant", ("no",)),
    )
    assert [medium.address for medium in conversation.media] == ["/a.png", "/b.png", "/c.mp4"]


def test_media_without_a_tag_come_first_in_the_order_of_the_row():
    row = said("what?", "that", "and <image>?", "this", images=["a.png", "b.png"], videos=["c.mp4"])
    turns = parse_conversation(row, "r", root="/data/").turns
    assert turns[0].parts == (image("/data/a.png"), "\n", MediaReference("video", "/data/c.mp4"), "\n", "what?")
    assert turns[2].parts == ("and ", image("/data/b.png"), "?")


@check_each(
    ("root", "path", "found"),
    [
        (None, "a.png", "a.png"),
        ("/data", "a.png", "/data/a.png"),
        ("/data", "/b/a.png", "/b/a.png"),
        ("s3://bucket/x/", "a.png", "s3://bucket/x/a.png"),
        ("/data", "s3://bucket/a.png", "s3://bucket/a.png"),
    ],
)
def test_relative_paths_are_below_the_root(root, path, found):
    assert parse_conversation(said("?", "!", image=path), "r", root=root).media == [image(found)]


def test_messages_have_parts_or_texts():
    content = [{"type": "image", "image": "/a.png"}, {"type": "text", "text": "?"}, {"type": "video"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "<image>"},  # plain text in an answer
    ]
    conversation = parse_conversation({"messages": messages, "video": "/b.mp4"}, "r", system_prompt="not this one")
    assert conversation.turns == (
        Turn("system", ("be brief",)),
        Turn("user", (image("/a.png"), "?", MediaReference("video", "/b.mp4"))),
        Turn("assistant", ("<image>",)),
    )


def test_the_system_prompt_applies_to_rows_without_one():
    assert parse_conversation(said("?", "!"), "r", system_prompt="").turns[0] == Turn("system", ("",))


@check_each(
    ("row", "reason", "words"),
    [
        (None, "row", "not a JSON object"),
        ([], "row", "not a JSON object"),
        ({"text": "a"}, "row", "no conversations or messages"),
        (said("\ud800", "!"), "row", "not a JSON object"),
        (said("?", "!", image=[1]), "row", "image must be a path or a list"),
        ({"conversations": []}, "no_answer", "no answer"),
        (said("?"), "no_answer", "no answer"),
        ({"conversations": [{"from": "gpt", "value": "!"}]}, "turn", "assistant out of order"),
        ({"conversations": [{"from": "robot", "value": "!"}]}, "turn", "a turn of 'robot'"),
        ({"conversations": ["hello"]}, "turn", "a turn is not a JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "turn", "content type 'audio'"),
        ({"conversations": [{"from": "human", "value": 3}]}, "turn", "without text"),
        (said("<image> <image>", "!", image="/a.png"), "no_media", "2 <image> tags, 1 images"),
        (said("<video>", "!", images=["/a.png"]), "no_media", "1 <video> tags, 0 videos"),
        (said("?", "!", image="http://example.com/a.png"), "media", "neither a path nor an s3:// address"),
    ],
)
def test_errors_of_a_row(row, reason, words):
    with pytest.raises(BadConversation, match=words) as error:
        parse_conversation(row, "file.json[3]")
    assert error.value.reason == reason
    assert str(error.value).startswith("file.json[3]: ")


def test_files_of_annotations(tmp_path):
    rows = [said("?", "!"), said("?", "!!")]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(rows[0]), "", "{broken", json.dumps(rows[1])]))
    (tmp_path / "c.txt").write_text("no annotations")
    assert annotation_files([str(tmp_path)]) == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")]
    assert list(read_rows(tmp_path / "b.json")) == [(f"{tmp_path}/b.json[{i}]", row) for i, row in enumerate(rows)]
    numbers = [(name.rpartition(":")[2], row) for name, row in read_rows(tmp_path / "a.jsonl")]
    assert numbers == [("1", rows[0]), ("3", None), ("4", rows[1])]


@check_each("suffix", [".json", ".jsonl"])
def test_a_row_may_have_other_line_ends_and_a_number_too_long_for_python_makes_only_its_row_bad(tmp_path, suffix):
    good = json.dumps(said("one\u2028two\x85three", "!"), ensure_ascii=False)
    rows = [good, '{"id": ' + "7" * 5000 + ', "conversations": []}', good]
    text = "\n".join(rows) if suffix == ".jsonl" else f"[{','.join(rows)}]"
    (tmp_path / f"a{suffix}").write_text(text)
    reasons = []
    for name, row in read_rows(tmp_path / f"a{suffix}"):
        try:
            assert parse_conversation(row, name).turns[0].parts == ("one\u2028two\x85three",)
            reasons.append(None)
        except BadConversation as error:
            reasons.append(error.reason)
    assert reasons == [None, "row", None]


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.json or \.jsonl file in this folder"):
        annotation_files([str(tmp_path / "empty")])
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(tmp_path / "missing.json"))
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DataError, match="is not a regular file"):
        list(read_rows(tmp_path / "pipe.json"))
    (tmp_path / "object.json").write_text("{}")
    with pytest.raises(DataError, match="not a JSON list"):
        list(read_rows(tmp_path / "object.json"))
