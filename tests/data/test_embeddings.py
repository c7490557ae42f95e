"""Untrusted pickles: arrays are read, code is not executed, and the command converts them to safetensors."""

import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from each_case import check_each
from wfm_ds.data.embeddings import EMBEDDING_KEY, main, read_pickle
from wfm_ds.errors import DataError


def array(seed=0, shape=(5, 8), dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@check_each("protocol", [3, 4, 5])
@check_each("dtype", [np.float16, np.float32, np.float64])
@check_each("wrap", [list, tuple, np.asarray, lambda items: items[0][None]])
def test_arrays_of_every_protocol_and_float_come_back(tmp_path, protocol, dtype, wrap):
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(wrap([array(dtype=dtype)]), protocol=protocol))
    loaded = read_pickle(tmp_path / "a.pickle")
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(loaded, array(dtype=dtype))


def test_names_from_before_numpy_2_are_known(tmp_path):
    content = pickle.dumps([array()], protocol=3)
    assert b"numpy._core.multiarray" in content
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (tmp_path / "a.pickle").write_bytes(old)
    np.testing.assert_array_equal(read_pickle(tmp_path / "a.pickle"), array())


class Shell:
    """Unpickling it would run a shell command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_code_in_pickles_is_not_executed(tmp_path):
    for number, content in enumerate([Shell(f"touch {tmp_path}/ran"), [array(), Shell(f"touch {tmp_path}/ran")]]):
        (tmp_path / f"{number}.pickle").write_bytes(pickle.dumps(content))
        with pytest.raises(
            DataError, match=r"rejected, a pickle may contain only plain arrays: posix\.system is not allowed"
        ):
            read_pickle(tmp_path / f"{number}.pickle")
    assert not (tmp_path / "ran").exists()


@check_each(
    "content",
    [torch.zeros(2, 3), [array(), array()], array(shape=(8,)), np.arange(6).reshape(2, 3), {"a": array()}, "text", []],
)
def test_anything_but_one_matrix_of_floats_is_refused(tmp_path, content):
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=r"a\.pickle (rejected, a pickle may contain only|contains (neither|an)) "):
        read_pickle(tmp_path / "a.pickle")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_anywhere_gives_a_matrix_or_an_error(tmp_path_factory, data):
    content = bytearray(pickle.dumps([array()], protocol=data.draw(st.sampled_from([3, 4, 5]))))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(content)
    try:
        assert read_pickle(path).ndim == 2
    except DataError as error:
        assert "damaged.pickle" in str(error)  # noqa: PT017


def test_a_state_that_numpy_refuses_without_a_reason_is_an_error(tmp_path):
    content = pickle.dumps([array()], protocol=4)
    byte_order = b"\x8c\x01<"
    more = content.replace(byte_order + b"\x94", byte_order + b"}")  # one more item than the state of a dtype has
    assert more != content
    (tmp_path / "a.pickle").write_bytes(more)
    with pytest.raises(DataError, match=r"a\.pickle rejected, a pickle may contain only plain arrays"):
        read_pickle(tmp_path / "a.pickle")


def test_the_command_converts_once_and_names_what_it_cannot(tmp_path, capsys):
    for name, content in (("text_embedding/a", [array()]), ("t5_xxl/sub/b", array(1)), ("t5_xxl/bad", Shell("true"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(content))
    assert main([str(tmp_path), "--from-pickle"]) == 2
    out, err = capsys.readouterr()
    assert out == f"2 embeddings written below {tmp_path}\n"
    assert "bad.pickle rejected, a pickle may contain only plain arrays" in err
    np.testing.assert_array_equal(load_file(tmp_path / "text_embedding/a.safetensors")[EMBEDDING_KEY], array())
    np.testing.assert_array_equal(load_file(tmp_path / "t5_xxl/sub/b.safetensors")[EMBEDDING_KEY], array(1))
    (tmp_path / "t5_xxl/bad.pickle").unlink()
    assert main([str(tmp_path), "--from-pickle"]) == 0
    assert capsys.readouterr().out == f"0 embeddings written below {tmp_path}\n"
    assert main([str(tmp_path / "t5_xxl"), "--from-pickle"]) == 2
