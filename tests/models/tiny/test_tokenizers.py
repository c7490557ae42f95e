from each_case import check_each
from wfm_ds.models.tiny.tokenizers import (
    QWEN_SYSTEM_WORDS,
    WORDS,
    WORDS_WITHOUT_DIGITS,
    clip_tokenizer,
    gemma_tokenizer,
    prefix_merges,
    qwen_tokenizer,
    suffix_merges,
    t5_tokenizer,
)

TOKENIZERS = {"clip": clip_tokenizer(16), "t5": t5_tokenizer(), "gemma": gemma_tokenizer(), "qwen": qwen_tokenizer()}
ALL_WORDS = dict.fromkeys(TOKENIZERS, WORDS) | {"qwen": (*WORDS_WITHOUT_DIGITS, *QWEN_SYSTEM_WORDS)}
SIZES = {"clip": 614, "t5": 138, "gemma": 487, "qwen": 435}
SPECIAL_IDS = {  # start, end, padding, unknown
    "clip": (612, 613, 613, 613),
    "t5": (None, 1, 0, 2),
    "gemma": (2, 1, 0, 3),
}


def encode(name, text):
    """Return the token ids of `text`. Gemma's vocabulary has words only after a space, so a character precedes it."""
    if name != "gemma":
        return TOKENIZERS[name](text, add_special_tokens=False).input_ids
    bos, first, *rest = TOKENIZERS[name](f"x {text}").input_ids
    assert (bos, first) == (TOKENIZERS[name].bos_token_id, TOKENIZERS[name].convert_tokens_to_ids("x"))
    return rest


@check_each("name", TOKENIZERS)
def test_every_word_is_one_token_also_in_a_sentence(name):
    ids = [encode(name, word) for word in ALL_WORDS[name]]
    assert all(len(word_ids) == 1 for word_ids in ids)
    assert len({word_ids[0] for word_ids in ids}) == len(ALL_WORDS[name])
    assert [TOKENIZERS[name].unk_token_id] not in ids
    assert encode(name, " ".join(ALL_WORDS[name])) == [word_ids[0] for word_ids in ids]


@check_each("name", TOKENIZERS)
def test_unknown_words_are_spelled(name):
    zebra = encode(name, "zebra")
    assert len(zebra) >= 5
    assert zebra != encode(name, "zebro")


@check_each("name", TOKENIZERS)
def test_sizes_and_special_ids(name):
    tokenizer = TOKENIZERS[name]
    assert len(tokenizer) == SIZES[name]
    if name in SPECIAL_IDS:
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        assert tuple(getattr(tokenizer, key) for key in names) == SPECIAL_IDS[name]


def test_gemma_knows_all_characters_and_spells_the_first_word():
    gemma = TOKENIZERS["gemma"]
    assert gemma.convert_ids_to_tokens(gemma("the robot").input_ids) == ["<bos>", "t", "h", "e", "\u2581robot"]
    assert gemma.unk_token_id not in encode("gemma", "\u00e9t\u00e9 ~!\u4e2d")
    assert gemma("").input_ids == [gemma.bos_token_id]


def test_qwen_s_digits_are_tokens_and_a_chat_has_its_marks():
    qwen = TOKENIZERS["qwen"]
    assert qwen.decode(qwen("the digit 7").input_ids).split() == ["the", "digit", "7"]
    chat = [{"role": "user", "content": [{"type": "text", "text": "a cat"}]}]
    tokens = qwen.convert_ids_to_tokens(qwen.apply_chat_template(chat, tokenize=True)["input_ids"])
    assert tokens[:2] == ["<|im_start|>", "\u0120user"]
    assert "\u0120cat" in tokens
    assert qwen.eos_token == "<|im_end|>"


def test_merges_build_a_word_next_to_its_space_marker():
    assert suffix_merges("red", "</w>") == [("e", "d</w>"), ("r", "ed</w>")]
    assert suffix_merges("a", "</w>") == []
    assert prefix_merges("_", ["red", "rod"]) == [("_", "r"), ("_r", "e"), ("_re", "d"), ("_r", "o"), ("_ro", "d")]
