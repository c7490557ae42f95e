"""Out-of-memory errors: a real one on this CPU, and torch's messages for GPUs. tests/faults tests a full run."""

import pytest
import torch

from each_case import check_each
from wfm_ds.errors import RunError, UserError, is_out_of_memory
from wfm_ds.memory.advice import OutOfMemory, explain_out_of_memory, suggest_keys_after_oom
from wfm_ds.monitoring.meters import GIB
from wfm_ds.recipe import file as recipe_file

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
TOO_MANY = 2**50  # bytes: larger than the address space
ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free."
)


def told(error, device=CPU, phase="train"):
    with (
        pytest.raises(OutOfMemory) as raised,
        explain_out_of_memory(device, lambda phase: [f"a of {phase}", "b"], lambda: phase),
    ):
        raise error
    assert isinstance(raised.value, UserError)
    assert raised.value.__cause__ is error
    return str(raised.value)


def test_a_failed_cpu_allocation_is_a_one_line_error():
    with pytest.raises(OutOfMemory) as raised, explain_out_of_memory(CPU, lambda phase: ["less"], lambda: "train"):
        torch.empty(TOO_MANY, dtype=torch.uint8)
    assert str(raised.value).startswith("out of memory on cpu in phase train: requested 1048576.0 GiB more, the")
    assert str(raised.value).endswith("; change less")


def test_the_error_of_a_gpu_has_peak_total_and_other_memory(monkeypatch):
    seen = []

    def of(value):
        return lambda device: seen.append(device) or value

    monkeypatch.setattr(torch.cuda, "mem_get_info", of((GIB, 80 * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", of(60 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of(58 * GIB))
    assert told(torch.OutOfMemoryError(ON_CUDA), GPU) == (
        "out of memory on cuda:1 in phase train: requested 2.5 GiB more, the peak of tensors was 58.0 GiB, "
        "the GPU has 80.0 GiB, others use 19.0 GiB of it; change a of train, or b"
    )
    assert set(seen) == {GPU}


@check_each(
    "error",
    [
        MemoryError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_other_out_of_memory_messages_are_recognized(error):
    assert "requested" not in told(error, phase=None)
    assert told(error, phase=None).startswith("out of memory on cpu: the peak of the process was ")


@check_each("error", [RuntimeError("shapes differ"), RunError("worker: out of memory"), KeyError("x")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, explain_out_of_memory(CPU, lambda phase: [], lambda: None):
        raise error
    assert raised.value is error


def test_an_error_that_was_raised_from_it_counts():
    error = RuntimeError("a layer failed")
    error.__cause__ = torch.OutOfMemoryError(ON_CUDA)
    assert is_out_of_memory(error)


def test_advice_starts_with_the_cheapest_key_of_the_phase(root):
    changes = ["engine.micro_batch_size=8", "engine.max_forward_batch=4", "engine.deepspeed=zero2"]
    nft = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", changes)
    for phase, first in (
        ("train", ["model.gradient_checkpointing: true", "engine.micro_batch_size below 8"]),
        ("rollout", ["engine.max_forward_batch below 4"]),
        ("ref_forward", ["engine.max_forward_batch below 4"]),
        ("decode", ["model.vae_dtype: bfloat16", "sampling.height, width or num_frames"]),
    ):
        assert suggest_keys_after_oom(nft, phase, num_ranks=8)[: len(first)] == first
    assert "engine.deepspeed: zero3" in suggest_keys_after_oom(nft, "train", num_ranks=8)
    assert not [key for key in suggest_keys_after_oom(nft, "optimizer", num_ranks=8) if "batch" in key]


def test_advice_for_distillation_fits_its_phases_and_its_engine(root):
    path = root / "tests" / "recipes" / "sd3_dmd2.yaml"
    dmd2 = recipe_file.load_recipe(path, ["engine.max_forward_batch=4"])
    for phase in ("teacher_forward", "fake_forward"):
        assert suggest_keys_after_oom(dmd2, phase, num_ranks=8)[0] == "engine.max_forward_batch below 4"
    for phase in ("fake_train", "train"):
        keys = suggest_keys_after_oom(dmd2, phase, num_ranks=8)
        assert "model.gradient_checkpointing: true" in keys
        assert "engine.deepspeed: zero3_offload" not in keys  # several adapters do not support offload
