"""Selection of GPUs or the CPU for this process, and the device of a thread."""

import threading

import pytest
import torch
import torch.distributed as dist

from wfm_ds.cli.doctor.command import count_visible_gpus
from wfm_ds.cli.doctor.machine import gpu_finding
from wfm_ds.distributed import accelerator
from wfm_ds.distributed.accelerator import choose_accelerator, uses_cuda
from wfm_ds.distributed.ranks import LOOPBACK, LaunchedRank
from wfm_ds.distributed.world import World
from wfm_ds.models.assets.loading import select_device


@pytest.fixture
def machine_with_gpus(monkeypatch):
    """Simulate a machine with two GPUs; using one of them fails the test."""

    def touched(*args):
        raise AssertionError("a GPU was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("set_device", "get_device_name", "current_device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)


@pytest.fixture
def in_a_group(monkeypatch):
    """Simulate a process group with this process as its only rank."""
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 1}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    only_rank = LaunchedRank(0, 1, 0, 1, LOOPBACK, 29500, "RANK")
    for name, value in only_rank.variables().items():  # restored after the test: World.join sets them too
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("said", "answer"), [("cpu", False), ("cuda", True), (None, True)])
def test_gpus_are_used_unless_another_accelerator_is_set(machine_with_gpus, monkeypatch, said, answer):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if said is not None:
        monkeypatch.setenv("DS_ACCELERATOR", said)
    assert uses_cuda() is answer


def test_no_process_uses_gpus_if_the_cpu_was_chosen(machine_with_gpus, in_a_group, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert World.join().device == torch.device("cpu")
    assert select_device(None) == torch.device("cpu")
    assert count_visible_gpus() == 0


def test_the_doctor_says_that_gpus_are_not_used(machine_with_gpus, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("wfm_ds.cli.doctor.machine.is_accelerator_present", lambda: True)
    finding = gpu_finding()
    assert (finding.level, "DS_ACCELERATOR=cpu" in finding.text) == ("warning", True)


def test_without_a_gpu_deepspeed_uses_the_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "")  # monkeypatch restores it after the test
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choose_accelerator()
    assert accelerator.os.environ["DS_ACCELERATOR"] == "cpu"


def test_a_thread_computes_on_its_assigned_device(monkeypatch):
    """torch.cuda stores the current device of each thread, initially 0; a thread-local variable replaces it here."""
    here = threading.local()
    seen = []

    def exchange(index):
        before, here.index = getattr(here, "index", 0), index
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)

    def lane():
        with accelerator.device_context(torch.device("cuda", 3)):
            seen.append(here.index)
        seen.append(here.index)

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    with accelerator.device_context(torch.device("cpu")):
        assert not hasattr(here, "index")
    assert seen == [3, 0]
