import pytest

from wfm_ds.models.tiny.parts.clip import clip_tokenizer
from wfm_ds.models.tiny.parts.t5 import t5_tokenizer
from wfm_ds.models.tiny.parts.vocabulary import WORDS, prefix_merges, suffix_merges

TOKENIZERS = {"clip": clip_tokenizer(16), "t5": t5_tokenizer()}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_every_word_is_one_token_of_its_own(tokenizer):
    ids = [tokenizer(word, add_special_tokens=False).input_ids for word in WORDS]
    assert all(len(word_ids) == 1 for word_ids in ids)
    assert len({word_ids[0] for word_ids in ids}) == len(WORDS)
    assert [tokenizer.unk_token_id] not in ids


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_words_do_not_disturb_each_other_in_a_sentence(tokenizer):
    alone = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in WORDS]
    assert tokenizer(" ".join(WORDS), add_special_tokens=False).input_ids == alone


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_unknown_words_are_spelled(tokenizer):
    zebra = tokenizer("zebra", add_special_tokens=False).input_ids
    assert len(zebra) >= 5
    assert zebra != tokenizer("zebro", add_special_tokens=False).input_ids


def test_sizes_and_special_ids():
    clip, t5 = TOKENIZERS["clip"], TOKENIZERS["t5"]
    assert (len(clip), len(t5)) == (614, 138)
    assert (clip.bos_token_id, clip.eos_token_id, clip.pad_token_id) == (612, 613, 613)
    assert (t5.pad_token_id, t5.eos_token_id, t5.unk_token_id) == (0, 1, 2)


def test_chains_build_the_word_next_to_its_mark():
    assert suffix_merges("red", "</w>") == [("e", "d</w>"), ("r", "ed</w>")]
    assert suffix_merges("a", "</w>") == []
    assert prefix_merges("_", "red") == [("_", "r"), ("_r", "e"), ("_re", "d")]


def test_words_cover_the_digits():
    assert set("0123456789") < set(WORDS)
    assert len(set(WORDS)) == len(WORDS)
