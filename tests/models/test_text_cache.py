import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from families import load_tiny
from wfm_ds.errors import DataError, ModelError
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache, num_bytes
from wfm_ds.models.base import NegativeText
from wfm_ds.storage.tensor_store import TensorStore


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("sd3"), "sd3")


@pytest.fixture
def counted(model, monkeypatch):
    """Return the list of texts that the model has actually encoded."""
    seen, encode = [], model.encode_text
    monkeypatch.setattr(model, "encode_text", lambda texts: seen.extend(texts) or encode(texts))
    return seen


TEXTS = ["a red circle", "a blue square", "a red circle", ""]


def test_cached_text_equals_fresh_text_in_order(model):
    cache = TextCache(model)
    for _ in range(2):
        got = cache.encode(TEXTS)
        want = model.encode_text(TEXTS)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_a_negative_text_is_another_entry_than_the_same_prompt(tiny_pipelines):
    model = load_tiny(tiny_pipelines("sana"), "sana")
    model.instruction = ["draw"]
    cache = TextCache(model)
    for _ in range(2):
        got = cache.encode(["cat", NegativeText("cat")])
        for name, tensor in got.items():
            torch.testing.assert_close(tensor[:1], model.encode_text(["cat"])[name], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(tensor[1:], model.encode_negative_text(["cat"])[name], rtol=1e-5, atol=1e-5)
    assert not torch.equal(got["prompt_attention_mask"][0], got["prompt_attention_mask"][1])


def test_every_text_is_encoded_once(model, counted):
    cache = TextCache(model)
    cache.encode(TEXTS)
    cache.encode(TEXTS[::-1])
    assert sorted(counted) == sorted(set(TEXTS))


def test_the_least_recently_used_text_is_evicted_first(model, counted):
    one = num_bytes(model.encode_text(["x"]))
    counted.clear()
    cache = TextCache(model, max_bytes=2 * one)
    cache.encode(["a"])
    cache.encode(["b"])
    cache.encode(["a"])
    cache.encode(["c"])  # evicts b
    cache.encode(["a"])
    assert counted == ["a", "b", "c"]
    cache.encode(["b"])
    assert counted == ["a", "b", "c", "b"]


def test_a_new_text_may_evict_a_cached_text_of_its_batch(model):
    one = num_bytes(model.encode_text(["x"]))
    cache = TextCache(model, max_bytes=3 * one)
    texts = [f"text {i}" for i in range(5)]
    for start in range(40):
        batch = [texts[(start * 2 + k * k) % 5] for k in range(4)]  # 3 texts fit
        got, want = cache.encode(batch), model.encode_text(batch)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


class Copies(TorchDispatchMode):
    """Count copies to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None
        return func(*args, **(kwargs or {}))


def copies_of(cache, texts):
    with Copies() as seen:
        got = cache.encode(texts)
    return seen.count, got


@pytest.fixture
def elsewhere(tiny_pipelines, tmp_path):
    """Return a model on a device other than the host, a store with the texts a to e, and their embeddings."""
    model = load_tiny(tiny_pipelines("sd3"), "sd3")
    store = TensorStore(tmp_path)
    want = TextCache(model, store=store).encode(["a", "b", "c", "d", "e"])
    model.move_to_device("meta")
    return model, store, want


def test_rows_on_the_device_are_not_copied_again(elsewhere):
    model, store, want = elsewhere
    cache = TextCache(model, store=store)
    first, got = copies_of(cache, ["a", "b", "a"])
    assert first == 2 * len(want), "each text once"
    for name, tensor in got.items():
        assert (tensor.device.type, tensor.dtype, tensor.shape) == (
            "meta",
            want[name].dtype,
            (3, *want[name].shape[1:]),
        )
    assert copies_of(cache, ["b", "b", "a", "a"])[0] == 0
    assert copies_of(cache, ["c", "a"])[0] == len(want)


def test_the_device_cache_evicts_the_least_recently_used_texts(elsewhere):
    model, store, want = elsewhere
    cache = TextCache(model, store=store, max_device_bytes=2 * num_bytes({n: t[:1] for n, t in want.items()}))
    copied = [copies_of(cache, [text])[0] // len(want) for text in "abacabb"]
    assert copied == [1, 1, 0, 1, 0, 1, 0]  # c evicts b, b evicts c
    count, got = copies_of(cache, list("abcde"))
    assert count == 3 * len(want)
    assert all(len(tensor) == 5 for tensor in got.values()), "more than fit still make a batch"


def test_prepared_texts_are_not_encoded_again_nor_those_that_are_stored(model, counted, tmp_path):
    TextCache(model, store=TensorStore(tmp_path)).encode(["stored"])
    counted.clear()
    cache = TextCache(model, store=TensorStore(tmp_path))
    cache.prepare(["stored", "new", "new"])
    assert counted == ["new"]
    want = TextCache(model).encode(["new", "stored"])
    counted.clear()
    cache.prepare(["new"])
    assert_equal_rows(cache.encode(["new", "stored"]), want)
    assert counted == []


def test_at_most_half_of_the_text_memory_is_filled_ahead(model, counted):
    one = num_bytes(model.encode_text(["x"]))
    cache = TextCache(model, max_bytes=4 * one)
    cache.encode(["a", "b"])
    counted.clear()
    cache.prepare(["c", "d", "e"])
    assert counted == ["c", "d"]
    cache.encode(["a", "b"])
    assert counted == ["c", "d"], "what was there still is"


class GivenEmbedding:
    """Stub of an embedding file that counts its loads."""

    def __init__(self, tensor, name="file"):
        self.tensor, self.name, self.loads = tensor, name, 0

    def identity(self):
        return (self.name, 1)

    def load(self):
        self.loads += 1
        return self.tensor


def assert_equal_rows(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)


def test_stored_texts_need_no_encoders(tiny_pipelines, tmp_path):
    model = load_tiny(tiny_pipelines("sd3"), "sd3")
    texts = [*TEXTS, NegativeText("")]
    cache = TextCache(model, store=TensorStore(tmp_path))
    assert not any(map(cache.is_stored, texts))
    want = cache.encode(texts)
    assert_equal_rows(want, TextCache(model).encode(texts))
    later = TextCache(model, store=TensorStore(tmp_path))
    assert all(map(later.is_stored, texts))
    model.drop_text_encoders()
    assert_equal_rows(later.encode(texts), want)
    with pytest.raises(ModelError, match=r"the embedding of 'a new text' was removed from the disk cache"):
        later.encode(["a new text"])


def test_length_and_weights_are_part_of_the_key(tiny_pipelines, tmp_path):
    models = [
        registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu", max_sequence_length=length)
        for family, length in (("sd3", 16), ("sd3", 12), ("digits", 8))
    ]
    rows = []
    for model in models:
        cache = TextCache(model, store=TensorStore(tmp_path))
        assert not cache.is_stored("a cat")
        rows.append(cache.encode(["a cat"]))
        assert_equal_rows(rows[-1], model.encode_text(["a cat"]))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3


def test_embeddings_that_come_with_the_data_replace_the_encoder(tiny_pipelines, tmp_path):
    model = load_tiny(tiny_pipelines("cosmos25"), "cosmos25")
    embedding = model.encode_text(["another text"])["prompt_embeds"][0]
    given = GivenEmbedding(embedding)
    for _ in range(2):
        cache = TextCache(model, store=TensorStore(tmp_path), precomputed={"a cat": given})
        got = cache.encode(["a cat", NegativeText("a cat"), "a dog"])["prompt_embeds"]
        torch.testing.assert_close(got[0], embedding, rtol=0, atol=0)
        torch.testing.assert_close(got[1:], TextCache(model).encode(["a cat", "a dog"])["prompt_embeds"])
    assert given.loads == 1  # the second cache uses the stored result
    assert not TextCache(model, store=TensorStore(tmp_path)).is_stored("a cat")


def test_embeddings_of_another_encoder_are_ignored_with_one_warning(model, tiny_pipelines, caplog):
    cosmos = load_tiny(tiny_pipelines("cosmos25"), "cosmos25")
    for one in (cosmos, model):
        caplog.clear()
        given = {text: GivenEmbedding(torch.zeros(7, 24)) for text in ("a cat", "a dog")}
        got = TextCache(one, precomputed=given).encode(["a cat", "a dog"])
        assert_equal_rows(got, TextCache(one).encode(["a cat", "a dog"]))
        (message,) = caplog.messages
        assert "shape [7, 24]" in message


def test_a_broken_embedding_is_a_warning(model, caplog):
    class Broken(GivenEmbedding):
        def load(self):
            raise DataError("a.safetensors cannot be read")

    got = TextCache(model, precomputed={"a cat": Broken(None)}).encode(["a cat"])
    assert_equal_rows(got, model.encode_text(["a cat"]))
    assert caplog.messages == ["a.safetensors cannot be read; encoding the caption instead"]
