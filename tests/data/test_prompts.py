"""Prompt files: the published formats, ids with line numbers, and error messages with line numbers."""

import json
import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from folders import put
from wfm_ds.data.order import PromptOrder
from wfm_ds.data.prompts import load_prompt_file, load_prompts
from wfm_ds.errors import DataError
from wfm_ds.types import Prompt

CLAUSE = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": [{"class": "cup", "count": 3}]}


def written(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@check_each("name", ["pickscore", "dance_grpo_t2v", "of_my_own"])
def test_a_text_set_is_a_prompt_a_line(tmp_path, name):
    written(tmp_path / "test.txt", "a cat", "", "  a dog \t", 'a "quoted" {brace}', "a cat")
    assert load_prompts(tmp_path, name, "test") == [
        Prompt(id=f"{name}/test/1", text="a cat"),
        Prompt(id=f"{name}/test/3", text="a dog"),
        Prompt(id=f"{name}/test/4", text='a "quoted" {brace}'),
        Prompt(id=f"{name}/test/5", text="a cat"),  # duplicates get separate ids
    ]


def test_a_file_name_that_is_no_text_gives_ids_that_are(tmp_path):
    path = written(tmp_path / os.fsdecode(b"caf\xe9.txt"), "a cat")
    assert [prompt.id for prompt in load_prompt_file(path)] == ["caf\\udce9/1"]


def test_only_line_feeds_end_a_line(tmp_path):
    """Published prompts contain other Unicode separators."""
    (tmp_path / "train.txt").write_bytes("\ufeffone\u2028still one\r\ntwo\x0bstill two\x85".encode())
    texts = [p.text for p in load_prompts(tmp_path, "mine", "train")]
    assert texts == ["one\u2028still one", "two\x0bstill two"]


def test_the_ocr_target_is_the_text_in_the_first_double_quotes(tmp_path):
    written(
        tmp_path / "train.txt", 'A sign that says "HELLO 42".', 'Two "first one" and "second"', 'half open " but "x"'
    )
    assert [p.metadata for p in load_prompts(tmp_path, "ocr", "train")] == [
        {"ocr_target": "HELLO 42"},
        {"ocr_target": "first one"},
        {"ocr_target": "but"},
    ]


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


def test_a_jsonl_prompt_set_of_the_user(tmp_path):
    lines = [{"prompt": " the digit 7 ", "label": 7}, {"prompt": "sea", "negative_prompt": "fog", "size": [1, 2]}]
    written(tmp_path / "train.jsonl", json.dumps(lines[0]), "", json.dumps(lines[1]))
    assert load_prompts(tmp_path, "digits", "train") == [
        Prompt(id="digits/train/1", text="the digit 7", metadata={"label": 7}),
        Prompt(id="digits/train/3", text="sea", negative_text="fog", metadata={"size": [1, 2]}),
    ]


def test_ten_bad_lines_are_shown_of_many(tmp_path):
    written(tmp_path / "train.jsonl", *["{}"] * 25)
    with pytest.raises(DataError, match=r"line 10: no `prompt`.*and 15 more lines") as raised:
        load_prompts(tmp_path, "mine", "train")
    assert "line 11" not in str(raised.value)


NOT_UTF8 = '{"prompt": "a", "tag": "b"}\n{"prompt": "a \\ud800 cat"}\n{"prompt": "a", "tag": "\\udfff"}'
UNQUOTED = 'says "yes"\n\nno quotes\nempty ""\nlonely "'
GOOD = '{"prompt": "good"}\n\n'


@check_each(
    ("name", "files", "complaint"),
    [
        (
            "mine",
            {"train.jsonl": NOT_UTF8},
            "line 2: text that cannot be encoded as UTF-8 .*; line 3: text that cannot",
        ),
        ("geneval", {"train.jsonl": NOT_UTF8}, "line 2: text that cannot be encoded as UTF-8 .*; line 3: text that"),
        ("mine", {"train.txt": b"a cat\ncaf\xe9\n"}, r"train\.txt: line 2 is not UTF-8"),
        (
            "ocr",
            {"train.txt": UNQUOTED},
            r"train\.txt: line 3: no text in double quotes.*; line 4: no.*; line 5: no text",
        ),
        ("mine", {"train.jsonl": GOOD + '{"prompt": "a"'}, r"train\.jsonl: line 3: not JSON, .* at character 15"),
        ("mine", {"train.jsonl": GOOD + "a cat"}, "line 3: not JSON"),
        ("mine", {"train.jsonl": GOOD + '["a cat"]'}, "line 3: not a JSON object"),
        ("mine", {"train.jsonl": GOOD + '{"text": "a cat"}'}, "line 3: no `prompt`"),
        ("mine", {"train.jsonl": GOOD + '{"prompt": ["a cat"]}'}, "line 3: no `prompt`"),
        ("mine", {"train.jsonl": GOOD + '{"prompt": "  "}'}, "line 3: no `prompt`"),
        ("mine", {"train.jsonl": GOOD + '{"prompt": "a", "negative_prompt": 3}'}, "`negative_prompt` is not a string"),
        ("mine", {"train.jsonl": GOOD + "[" * 100000}, "line 3: (nested too deeply|no JSON)"),
        *(("mine", {"train.txt": text}, r"train\.txt has no prompts") for text in ("", "\n \n\t\n", b"\xef\xbb\xbf")),
        (
            "mine",
            {"test.txt": "a cat"},
            r"has no train\.txt or train\.jsonl \(data\.name mine.*prompt files: test\.txt",
        ),
        ("geneval", {"test.txt": "a cat"}, r"has no train_metadata\.jsonl or train\.jsonl"),
        ("mine", {"train.txt": "a cat", "train.jsonl": '{"prompt": "a dog"}'}, r"both train\.txt and train\.jsonl"),
    ],
)
def test_errors_name_the_line(tmp_path, name, files, complaint):
    with pytest.raises(DataError, match=complaint):
        load_prompts(put(tmp_path, files), name, "train")


def test_a_folder_must_exist_and_a_published_format_says_which_file_it_is(tmp_path):
    with pytest.raises(DataError, match=r"nowhere is not a folder"):
        load_prompts(tmp_path / "nowhere", "mine", "train")
    put(tmp_path, {"train.txt": "a cat", "train.jsonl": '{"prompt": "a dog"}'})
    assert load_prompts(tmp_path, "pickscore", "train")[0].text == "a cat"


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
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt cannot be read: is not a regular file"):
        load_prompt_file(tmp_path / "pipe.txt")


def asked(num_prompts, count, steps, shuffle=True, seed=5):
    order = PromptOrder([Prompt(id=f"{i}", text="") for i in range(num_prompts)], seed=seed, shuffle=shuffle)
    return [[int(p.id) for p in order.step_prompts(step, count)] for step in steps]


@given(num_prompts=st.integers(1, 12), count=st.integers(1, 30), shuffle=st.booleans())
def test_every_prompt_is_used_once_per_epoch_across_partial_steps(num_prompts, count, shuffle):
    flat = [i for step in asked(num_prompts, count, range(1, num_prompts + 1), shuffle) for i in step]
    epochs = [flat[k : k + num_prompts] for k in range(0, len(flat), num_prompts)]
    assert len(flat) == num_prompts * count
    assert all(Counter(epoch) == Counter(range(num_prompts)) for epoch in epochs)
    assert shuffle or flat == list(range(num_prompts)) * count


def test_a_step_does_not_depend_on_those_before_it():
    assert asked(7, 3, [9, 2, 9]) == [asked(7, 3, range(1, 10))[i - 1] for i in (9, 2, 9)]
    assert asked(30, 30, [1], seed=1) != asked(30, 30, [1], seed=2)


@pytest.mark.parametrize("shuffle", [True, False])
def test_further_prompts_follow_from_step_and_attempt_and_are_others(shuffle):
    prompts = [Prompt(id=f"{i}", text="") for i in range(1000)]
    order, again = (PromptOrder(prompts, seed=3, shuffle=shuffle) for _ in range(2))
    first = {attempt: [p.id for p in order.extra_prompts(7, 4, attempt)] for attempt in (1, 2)}
    assert {attempt: [p.id for p in again.extra_prompts(7, 4, attempt)] for attempt in (2, 1)} == first
    own = [p.id for p in order.step_prompts(7, 4)]
    assert len({*own, *first[1], *first[2]}) == 12
    whole = [p.id for step in range(1, 250) for p in order.extra_prompts(step, 4, 1)]
    assert len(set(whole)) == len(whole)  # each at most once in the epochs of the extra prompts


def test_no_prompt_is_an_error():
    with pytest.raises(DataError, match="prompt set is empty"):
        PromptOrder([], seed=0, shuffle=True)
