"""Labels of rendered conversations: only the answers and their end tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.errors import ModelError
from wfm_ds.language.annotations import BadConversation, Conversation, MediaReference, Turn
from wfm_ds.language.renderer import IGNORE_INDEX, Renderer, splice_text
from wfm_ds.models.tiny.tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer()
IMAGE, VIDEO = MediaReference("image", "a.png"), MediaReference("video", "b.mp4")
PAD, FRAMES = "<|image_pad|>", "<|video_pad|>"
LEFT, RIGHT = "<|vision_start|>", "<|vision_end|>"


def talk(*turns, system=None):
    """Return a conversation with alternating user and assistant turns; a turn is a text or a tuple of parts."""
    parts = [turn if isinstance(turn, tuple) else (turn,) for turn in turns]
    spoken = [Turn(("user", "assistant")[i % 2], part) for i, part in enumerate(parts)]
    return Conversation("c", (*([Turn("system", (system,))] if system is not None else []), *spoken))


def labelled(tokens):
    """Return the decoded text of each run of labelled tokens."""
    runs, last = [], IGNORE_INDEX
    for token, label in zip(tokens.ids, tokens.labels, strict=True):
        assert label in (token, IGNORE_INDEX)
        if label != IGNORE_INDEX:
            runs = [*runs, []] if last == IGNORE_INDEX else runs
            runs[-1].append(label)
        last = label
    return [TOKENIZER.decode(run) for run in runs]


END = "<|im_end|>"
GOLDEN = {
    "system": (talk("hello", "a cat", system="be helpful"), [], ["a cat" + END]),
    "two turns": (talk("hello", "a cat", "and", "the robot"), [], ["a cat" + END, "the robot" + END]),
    "two images in the text": (
        talk((IMAGE, " and ", IMAGE, "\n?"), "a red circle", ("or ", IMAGE), "blue"),
        [LEFT + PAD * 3 + RIGHT, LEFT + PAD * 5 + RIGHT, LEFT + PAD + RIGHT],
        ["a red circle" + END, "blue" + END],
    ),
    "video with times": (
        talk((VIDEO, "what moves"), "a robot"),
        [f"<0.5 seconds>{LEFT}{FRAMES * 2}{RIGHT}<1.5 seconds>{LEFT}{FRAMES * 2}{RIGHT}"],
        ["a robot" + END],
    ),
    "empty answer": (talk("hello", "", "and", "\n"), [], [END, "\n" + END]),
    "unicode at borders": (talk("\u00e9?\u4e2d", "\u4e2d\u00e9 \U0001f916"), [], ["\u4e2d\u00e9 \U0001f916" + END]),
}


@check_each(("conversation", "expansions", "answers"), GOLDEN.values())
def test_labels_decode_to_the_answers(conversation, expansions, answers):
    tokens = Renderer(TOKENIZER).render(conversation, expansions)
    assert labelled(tokens) == answers
    # Expected: one tokenization of the whole text of the template, with the media inserted.
    content = [
        {
            "role": t.role,
            "content": [{"type": p.kind} if isinstance(p, MediaReference) else {"text": p} for p in t.parts],
        }
        for t in conversation.turns
    ]
    text, new = TOKENIZER.apply_chat_template(content, tokenize=False), iter(expansions)
    for pad in (PAD, FRAMES):
        text = "".join(piece if i == 0 else next(new) + piece for i, piece in enumerate(text.split(LEFT + pad + RIGHT)))
    assert tokens.ids == TOKENIZER(text, add_special_tokens=False).input_ids


def test_golden_ids():
    tokens = Renderer(TOKENIZER).render(talk((IMAGE, " is"), "red"), [LEFT + PAD * 2 + RIGHT])
    pieces = TOKENIZER.convert_ids_to_tokens(tokens.ids)
    start = ["<|im_start|>", *"user", "\u010a"]
    assert pieces[: len(start)] == start
    assert pieces[len(start) : len(start) + 4] == [LEFT, PAD, PAD, RIGHT]
    assert pieces[-5:] == [*"red", END, "\u010a"]
    assert [label != IGNORE_INDEX for label in tokens.labels[-6:]] == [False, True, True, True, True, False]


WORDS = st.text(st.sampled_from("ab \u00e9\u4e2d<>|\n"), min_size=1, max_size=8)


@given(st.lists(WORDS, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0))
def test_labels_are_the_answers_of_any_turns(turns):
    tokens = Renderer(TOKENIZER).render(talk(*turns), [])
    assert "".join(labelled(tokens)) == "".join(answer + END for answer in turns[1::2])


def test_options_for_labels_beyond_the_answers():
    conversation = talk(("<", IMAGE), "a cat", "and", "the robot", system="be helpful")
    places = [LEFT + PAD * 2 + RIGHT]
    assert labelled(Renderer(TOKENIZER, train_on="last_answer").render(conversation, places)) == ["the robot" + END]
    tokens = Renderer(TOKENIZER, train_on="all").render(conversation, places)
    silent = [token for token, label in zip(tokens.ids, tokens.labels, strict=True) if label == IGNORE_INDEX]
    assert TOKENIZER.convert_ids_to_tokens(silent) == ["<|im_start|>", PAD, PAD]  # the first token and the image


def test_a_text_with_a_media_token_is_refused():
    with pytest.raises(BadConversation, match="text contains a media token") as error:
        Renderer(TOKENIZER).render(talk(f"look: {PAD}", "no"), [])
    assert error.value.reason == "turn"


def test_with_a_template_that_changes_earlier_answers_only_the_last_one_trains():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}[{{ turn.role }}]{% if not loop.last and turn.role == 'assistant' %}short"
        "{% else %}{{ turn.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    conversation = talk("hello", "a long cat", "and", "the robot")
    with pytest.raises(ModelError, match=r"set algorithm\.train_on to last_answer"):
        Renderer(tokenizer).render(conversation, [])
    assert labelled(Renderer(tokenizer, train_on="last_answer").render(conversation, [])) == ["the robot" + END]


def test_a_tokenizer_without_chat_template_is_refused():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        Renderer(tokenizer)


def test_media_positions_move_with_inserted_text():
    text, moved = splice_text("ab[]cd[]e", [(2, 4, "<long>"), (6, 8, "")])
    assert text == "ab<long>cde"
    assert [moved(place) for place in (0, 2, 4, 6, 8, 9)] == [0, 2, 8, 10, 10, 11]
