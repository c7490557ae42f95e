"""The published formats, ids that hold line numbers, and messages that name the line."""

import json
import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.data.prompts import PromptOrder, load_prompt_file, load_prompts
from wfm_ds.errors import DataError
from wfm_ds.types import Prompt

CLAUSE = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": [{"class": "cup", "count": 3}]}


def written(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@check_each("name", ["pickscore", "dance_grpo_t2v", "of_my_own"])
def test_a_text_set_is_a_prompt_a_line(tmp_path, name):
    written(tmp_path / "test.txt", "a cat", "", "  a dog \t", 'a "quoted" {brace}')
    assert load_prompts(tmp_path, name, "test") == [
        Prompt(id=f"{name}/test/1", text="a cat"),
        Prompt(id=f"{name}/test/3", text="a dog"),
        Prompt(id=f"{name}/test/4", text='a "quoted" {brace}'),
    ]


def test_repeated_prompts_keep_their_own_ids(tmp_path):
    written(tmp_path / "train.txt", "a cat", "a cat")
    assert [p.id for p in load_prompts(tmp_path, "pickscore", "train")] == ["pickscore/train/1", "pickscore/train/2"]


@pytest.mark.parametrize("name", ["of_my_own", "geneval"])
def test_text_that_utf8_cannot_encode_is_named_by_its_line(tmp_path, name):
    lines = ['{"prompt": "a", "tag": "b"}', '{"prompt": "a \\ud800 cat"}', '{"prompt": "a", "tag": "\\udfff"}']
    written(tmp_path / "train.jsonl", *lines)
    with pytest.raises(
        DataError, match=r"line 2: text that cannot be encoded as UTF-8 .*; line 3: text that cannot be"
    ):
        load_prompts(tmp_path, name, "train")


def test_a_prompt_file_that_is_a_pipe_is_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "train.txt")
    with pytest.raises(DataError, match=r"train\.txt cannot be read: is not a regular file"):
        load_prompt_file(tmp_path / "train.txt")


def test_a_file_name_that_is_no_text_gives_ids_that_are(tmp_path):
    path = written(tmp_path / os.fsdecode(b"caf\xe9.txt"), "a cat")
    assert [prompt.id for prompt in load_prompt_file(path)] == ["caf\\udce9/1"]


def test_only_line_feeds_end_a_line(tmp_path):
    """Other separators of Unicode occur inside published prompts."""
    (tmp_path / "train.txt").write_bytes("\ufeffone\u2028still one\r\ntwo\x0bstill two\x85".encode())
    texts = [p.text for p in load_prompts(tmp_path, "mine", "train")]
    assert texts == ["one\u2028still one", "two\x0bstill two"]


def test_ocr_targets_are_what_the_first_double_quotes_hold(tmp_path):
    written(
        tmp_path / "train.txt", 'A sign that says "HELLO 42".', 'Two "first one" and "second"', 'half open " but "x"'
    )
    assert [p.metadata for p in load_prompts(tmp_path, "ocr", "train")] == [
        {"ocr_target": "HELLO 42"},
        {"ocr_target": "first one"},
        {"ocr_target": "but"},
    ]


def test_an_ocr_line_without_a_target_is_named(tmp_path):
    written(tmp_path / "train.txt", 'says "yes"', "", "no quotes", 'empty ""', 'lonely "')
    with pytest.raises(
        DataError, match=r"train\.txt: line 3: no text in double quotes.*; line 4: no text.*; line 5: no text"
    ):
        load_prompts(tmp_path, "ocr", "train")


@pytest.mark.parametrize("file", ["test_metadata.jsonl", "test.jsonl"])
def test_geneval_hands_the_whole_object_to_the_reward(tmp_path, file):
    record = {**CLAUSE, "prompt": "a photo of two cups"}
    written(tmp_path / file, json.dumps(record))
    (prompt,) = load_prompts(tmp_path, "geneval", "test")
    assert (prompt.id, prompt.text, prompt.metadata) == ("geneval/test/1", "a photo of two cups", record)


def test_dance_grpo_falls_back_to_its_single_file(tmp_path):
    written(tmp_path / "video_prompts.txt", "a man walks")
    assert load_prompts(tmp_path, "dance_grpo_t2v", "train")[0].text == "a man walks"
    written(tmp_path / "test.txt", "a woman walks")
    assert load_prompts(tmp_path, "dance_grpo_t2v", "test")[0].text == "a woman walks"


def test_a_jsonl_set_of_ones_own(tmp_path):
    lines = [{"prompt": " the digit 7 ", "label": 7}, {"prompt": "sea", "negative_prompt": "fog", "size": [1, 2]}]
    written(tmp_path / "train.jsonl", json.dumps(lines[0]), "", json.dumps(lines[1]))
    assert load_prompts(tmp_path, "digits", "train") == [
        Prompt(id="digits/train/1", text="the digit 7", metadata={"label": 7}),
        Prompt(id="digits/train/3", text="sea", negative_text="fog", metadata={"size": [1, 2]}),
    ]


@check_each(
    ("line", "complaint"),
    [
        ('{"prompt": "a"', "not JSON, .* at character 15"),
        ("a cat", "not JSON"),
        ('["a cat"]', "not a JSON object"),
        ('{"text": "a cat"}', "no `prompt`"),
        ('{"prompt": ["a cat"]}', "no `prompt`"),
        ('{"prompt": "  "}', "no `prompt`"),
        ('{"prompt": "a", "negative_prompt": 3}', "`negative_prompt` is not a string"),
        ("[" * 100000, "nested too deeply|no JSON"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_its_number(tmp_path, line, complaint):
    written(tmp_path / "train.jsonl", '{"prompt": "good"}', "", line)
    with pytest.raises(DataError, match=rf"train\.jsonl: line 3: ({complaint})"):
        load_prompts(tmp_path, "mine", "train")


def test_ten_bad_lines_are_shown_of_many(tmp_path):
    written(tmp_path / "train.jsonl", *["{}"] * 25)
    with pytest.raises(DataError, match=r"line 10: no `prompt`.*and 15 more lines") as raised:
        load_prompts(tmp_path, "mine", "train")
    assert "line 11" not in str(raised.value)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"a cat\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"train\.txt: line 2 is not UTF-8"):
        load_prompts(tmp_path, "mine", "train")


@check_each("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path, content):
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.txt has no prompts"):
        load_prompts(tmp_path, "mine", "train")


def test_a_missing_split_names_what_is_there(tmp_path):
    written(tmp_path / "test.txt", "a cat")
    with pytest.raises(
        DataError, match=r"has no train\.txt or train\.jsonl \(data\.name mine.*prompt files: test\.txt"
    ):
        load_prompts(tmp_path, "mine", "train")
    with pytest.raises(DataError, match=r"has no train_metadata\.jsonl or train\.jsonl"):
        load_prompts(tmp_path, "geneval", "train")
    with pytest.raises(DataError, match=r"nowhere is not a folder"):
        load_prompts(tmp_path / "nowhere", "mine", "train")


def test_two_files_for_one_split_are_ambiguous(tmp_path):
    written(tmp_path / "train.txt", "a cat")
    written(tmp_path / "train.jsonl", '{"prompt": "a dog"}')
    with pytest.raises(DataError, match=r"both train\.txt and train\.jsonl"):
        load_prompts(tmp_path, "mine", "train")
    assert load_prompts(tmp_path, "pickscore", "train")[0].text == "a cat"  # its format says which


def test_any_prompt_file_can_be_loaded_alone(tmp_path):
    text = written(tmp_path / "val.v2.txt", "a cat", "a dog")
    assert [(p.id, p.text) for p in load_prompt_file(text)] == [("val.v2/1", "a cat"), ("val.v2/2", "a dog")]
    objects = written(tmp_path / "val.jsonl", '{"prompt": "a cat", "label": 1}')
    assert load_prompt_file(objects) == [Prompt(id="val/1", text="a cat", metadata={"label": 1})]


def test_a_prompt_file_must_exist_and_be_of_a_known_kind(tmp_path):
    with pytest.raises(DataError, match=r"val\.csv is neither a \.txt"):
        load_prompt_file(written(tmp_path / "val.csv", "a cat"))
    with pytest.raises(DataError, match=r"none\.txt cannot be read: No such file"):
        load_prompt_file(tmp_path / "none.txt")


def asked(num_prompts, count, steps, shuffle=True, seed=5):
    order = PromptOrder([Prompt(id=f"{i}", text="") for i in range(num_prompts)], seed=seed, shuffle=shuffle)
    return [[int(p.id) for p in order.step_prompts(step, count)] for step in steps]


@given(num_prompts=st.integers(1, 12), count=st.integers(1, 30), shuffle=st.booleans())
def test_every_prompt_is_asked_once_per_epoch_and_partial_steps_carry_on(num_prompts, count, shuffle):
    flat = [i for step in asked(num_prompts, count, range(1, num_prompts + 1), shuffle) for i in step]
    epochs = [flat[k : k + num_prompts] for k in range(0, len(flat), num_prompts)]
    assert len(flat) == num_prompts * count
    assert all(Counter(epoch) == Counter(range(num_prompts)) for epoch in epochs)
    assert shuffle or flat == list(range(num_prompts)) * count


def test_a_step_does_not_depend_on_those_before_it():
    assert asked(7, 3, [9, 2, 9]) == [asked(7, 3, range(1, 10))[i - 1] for i in (9, 2, 9)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_further_prompts_follow_from_step_and_attempt_and_are_others(shuffle):
    prompts = [Prompt(id=f"{i}", text="") for i in range(1000)]
    order, again = (PromptOrder(prompts, seed=3, shuffle=shuffle) for _ in range(2))
    first = {attempt: [p.id for p in order.extra_prompts(7, 4, attempt)] for attempt in (1, 2)}
    assert {attempt: [p.id for p in again.extra_prompts(7, 4, attempt)] for attempt in (2, 1)} == first
    own = [p.id for p in order.step_prompts(7, 4)]
    assert len({*own, *first[1], *first[2]}) == 12
    whole = [p.id for step in range(1, 250) for p in order.extra_prompts(step, 4, 1)]
    assert len(set(whole)) == len(whole)  # each once an epoch of their own


def test_another_seed_asks_in_another_order():
    assert asked(30, 30, [1], seed=1) != asked(30, 30, [1], seed=2)


def test_no_prompt_is_an_error():
    with pytest.raises(DataError, match="prompt set is empty"):
        PromptOrder([], seed=0, shuffle=True)
