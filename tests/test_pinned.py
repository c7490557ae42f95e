import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wfm_ds.pinned import Shelf, aside, columns, on_device, room

CPU = torch.device("cpu")


def test_a_tensor_that_is_there_is_not_copied():
    tensor = torch.ones(3)
    assert on_device(tensor, CPU) is tensor
    assert on_device(tensor, "cpu") is tensor
    assert aside(tensor) is tensor
    assert Shelf(0).put(tensor) is tensor


def test_columns_are_what_torch_makes_of_each_list():
    lists = [0.1, 2.0, 1 / 3], [1.0, 0.0, 1e-30]
    for got, values in zip(columns(CPU, *lists), lists, strict=True):
        assert torch.equal(got, torch.tensor(values, dtype=torch.float32))
        assert got.is_contiguous()


def test_columns_of_nothing_are_empty():
    assert [tensor.shape for tensor in columns(CPU, [], [])] == [(0,), (0,)]


def test_shelf_takes_what_fits_and_puts_the_rest_on_the_host():
    with FakeTensorMode():
        rows = [torch.empty(size, device="cuda") for size in (60, 50, 30, 11, 10)]
        shelf = Shelf(100 * 4)
        kept = [shelf.put(row) for row in rows]
    assert [tensor.device.type for tensor in kept] == ["cuda", "cpu", "cuda", "cpu", "cuda"]
    assert all(tensor is row for tensor, row in zip(kept, rows, strict=True) if tensor.device.type == "cuda")
    assert [(tensor.shape, tensor.dtype) for tensor in kept] == [(row.shape, row.dtype) for row in rows]


def test_room_of_another_device_than_a_gpu_is_stated():
    assert room(CPU, 0.5) == 0
    assert room(CPU, 0.5, otherwise=7) == 7
