import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wfm_ds.tensor_memory import OffloadBuffer, copy_to_device, free_memory, lists_to_device, offload_tensor

CPU = torch.device("cpu")


def test_a_tensor_on_the_device_is_not_copied():
    tensor = torch.ones(3)
    assert copy_to_device(tensor, CPU) is tensor
    assert copy_to_device(tensor, "cpu") is tensor
    assert offload_tensor(tensor) is tensor
    assert OffloadBuffer(0).store(tensor) is tensor


def test_columns_equal_torch_tensors_of_the_lists():
    lists = [0.1, 2.0, 1 / 3], [1.0, 0.0, 1e-30]
    for got, values in zip(lists_to_device(CPU, *lists), lists, strict=True):
        assert torch.equal(got, torch.tensor(values, dtype=torch.float32))
        assert got.is_contiguous()


def test_columns_of_nothing_are_empty():
    assert [tensor.shape for tensor in lists_to_device(CPU, [], [])] == [(0,), (0,)]


def test_tensors_above_the_byte_limit_are_moved_to_the_host():
    with FakeTensorMode():
        rows = [torch.empty(size, device="cuda") for size in (60, 50, 30, 11, 10)]
        shelf = OffloadBuffer(100 * 4)
        kept = [shelf.store(row) for row in rows]
    assert [tensor.device.type for tensor in kept] == ["cuda", "cpu", "cuda", "cpu", "cuda"]
    assert all(tensor is row for tensor, row in zip(kept, rows, strict=True) if tensor.device.type == "cuda")
    assert [(tensor.shape, tensor.dtype) for tensor in kept] == [(row.shape, row.dtype) for row in rows]


def test_room_of_another_device_than_a_gpu_is_stated():
    assert free_memory(CPU, 0.5) == 0
    assert free_memory(CPU, 0.5, default=7) == 7
