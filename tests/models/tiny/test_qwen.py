from wfm_ds.models.tiny.parts.qwen import SYSTEM_WORDS, qwen_tokenizer
from wfm_ds.models.tiny.parts.vocabulary import WORDS

TOKENIZER = qwen_tokenizer()


def test_every_word_is_one_token_and_every_digit_its_own():
    words = [word for word in (*WORDS, *SYSTEM_WORDS) if not word.isdigit()]
    ids = [TOKENIZER(word).input_ids for word in words]
    assert all(len(word_ids) == 1 for word_ids in ids)
    assert len({word_ids[0] for word_ids in ids}) == len(words)
    assert TOKENIZER(" ".join(words)).input_ids == [word_ids[0] for word_ids in ids]
    assert TOKENIZER.decode(TOKENIZER("the digit 7").input_ids).split() == ["the", "digit", "7"]


def test_unknown_words_are_spelled():
    assert TOKENIZER("zebra").input_ids != TOKENIZER("zebro").input_ids
    assert len(TOKENIZER("zebra").input_ids) >= 5


def test_a_chat_has_its_marks():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a cat"}]}]
    ids = TOKENIZER.apply_chat_template(chat, tokenize=True)["input_ids"]
    tokens = TOKENIZER.convert_ids_to_tokens(ids)
    assert tokens[:2] == ["<|im_start|>", "\u0120user"]
    assert "\u0120cat" in tokens
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert len(TOKENIZER) == 435
