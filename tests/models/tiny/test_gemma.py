from wfm_ds.models.tiny.parts.gemma import gemma_tokenizer
from wfm_ds.models.tiny.parts.vocabulary import WORDS

TOKENIZER = gemma_tokenizer()
BOS = TOKENIZER.bos_token_id


def ids_after(text):
    """Ids of what follows the first character of a text: words there have a word mark."""
    first, second, *rest = TOKENIZER(f"x {text}").input_ids
    assert (first, second) == (BOS, TOKENIZER.convert_tokens_to_ids("x"))
    return rest


def test_every_word_after_a_blank_is_one_token_of_its_own():
    ids = [ids_after(word) for word in WORDS]
    assert all(len(word_ids) == 1 for word_ids in ids)
    assert len({word_ids[0] for word_ids in ids}) == len(WORDS)
    assert [TOKENIZER.unk_token_id] not in ids
    assert ids_after(" ".join(WORDS)) == [word_ids[0] for word_ids in ids]


def test_the_first_and_unknown_words_are_spelled_and_all_characters_known():
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER("the robot").input_ids) == ["<bos>", "t", "h", "e", "\u2581robot"]
    assert len(ids_after("zebra")) == 6
    assert TOKENIZER.unk_token_id not in ids_after("\u00e9t\u00e9 ~!\u4e2d")


def test_sizes_and_special_ids():
    assert len(TOKENIZER) == 487
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, BOS, TOKENIZER.unk_token_id) == (0, 1, 2, 3)
    assert TOKENIZER("").input_ids == [BOS]
