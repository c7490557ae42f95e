import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from wfm_ds.export.tensor_file import DTYPE_NAMES, StoredTensorSpec, TensorFile


def drawn(dtype, shape):
    bits = torch.randint(0, 256, [torch.Size(shape).numel() * dtype.itemsize], dtype=torch.uint8)
    return (bits % 2).bool().view(shape) if dtype == torch.bool else bits.view(dtype).view(shape)


def specs_of(tensors):
    return {name: StoredTensorSpec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@settings(max_examples=40)
@given(
    shapes=st.dictionaries(
        st.text(st.characters(blacklist_categories=("Cs",)), max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPE_NAMES)), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    order=st.randoms(use_true_random=False),
)
def test_files_are_bytewise_equal_to_those_of_safetensors_in_any_order(tmp_path_factory, shapes, order):
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    tensors = {name: drawn(dtype, shape) for name, (dtype, shape) in shapes.items()}
    save_file(tensors, folder / "theirs", metadata={"format": "pt"})
    names = list(tensors)
    order.shuffle(names)
    with TensorFile(folder / "ours", specs_of(tensors), {"format": "pt"}) as file:
        for name in names:
            file.write(name, tensors[name])
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_views_and_tensors_with_gradient_are_written_by_value(tmp_path):
    base = torch.arange(12.0).view(3, 4).requires_grad_()
    tensors = {"transposed": base.t(), "slice": base[:, 1]}
    with TensorFile(tmp_path / "file", specs_of(tensors), {}) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def half_written(path, specs):
    with TensorFile(path, specs, {}) as file:
        file.write("a", torch.zeros(2))


def test_unannounced_tensors_are_refused(tmp_path):
    specs = {
        "a": StoredTensorSpec(torch.float32, torch.Size([2])),
        "b": StoredTensorSpec(torch.float32, torch.Size([])),
    }
    with pytest.raises(ValueError, match=r"1 tensors are missing, e\.g\. b"):
        half_written(tmp_path / "half", specs)
    with TensorFile(tmp_path / "file", specs, {}) as file:
        with pytest.raises(ValueError, match=r"a is F32 \[3\], expected F32 \[2\]"):
            file.write("a", torch.zeros(3))
        for name, spec in specs.items():
            file.write(name, torch.zeros(spec.shape))
        with pytest.raises(KeyError):
            file.write("a", torch.zeros(2))
    with pytest.raises(FileExistsError):
        TensorFile(tmp_path / "file", specs, {})
