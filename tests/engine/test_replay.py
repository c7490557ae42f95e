"""CUDA graph replay without a GPU: input and output copies, when calls are recorded, and the calls to torch.cuda."""

import contextlib

import pytest
import torch
from torch import nn

from multi_rank.training import inputs, small_sd3
from streams import recorded_streams
from wfm_ds.engine import cuda_graphs
from wfm_ds.engine.cuda_graphs import CudaCapture, GraphReplayer, ReplayingNetwork
from wfm_ds.errors import UserError


@pytest.fixture(scope="module")
def network():
    return small_sd3().eval()


@pytest.fixture
def replays(network):
    return GraphReplayer(network, network.parameters)


def call(function, numbers, **options):
    with torch.no_grad():
        return function(**inputs(numbers), return_dict=False, **options)[0]


def through(replays, variant="old"):
    return lambda **arguments: replays(variant, (), arguments)


def test_replays_equal_plain_calls_and_outputs_are_separate_tensors(network, replays):
    batches = [range(3), range(3, 6), range(2), range(6, 9)]
    results = [call(through(replays), numbers) for numbers in batches]
    assert all(torch.equal(got, call(network, numbers)) for got, numbers in zip(results, batches, strict=True))
    assert len(replays.recordings) == 2, "of batches of 3 and of 2"


def test_each_kind_of_call_has_its_own_graph(network, replays):
    run = through(replays)
    call(run, range(2))
    for other in ({"joint_attention_kwargs": None}, {"skip_layers": [0]}):
        assert torch.equal(call(run, range(2), **other), call(network, range(2), **other))
    assert len(replays.recordings) == 3
    call(through(replays, "ema"), range(2))
    call(run, range(2))
    assert len(replays.recordings) == 4


def test_replays_see_in_place_changes_and_moved_weights_are_recorded_again():
    network = nn.Linear(3, 3)
    replays, x = GraphReplayer(network, network.parameters), torch.randn(2, 3)
    run = through(replays)
    before = run(input=x)
    with torch.no_grad():
        network.weight.mul_(2)
    assert not torch.equal(run(input=x), before)
    assert torch.equal(run(input=x), network(x))
    assert len(replays.recordings) == 1
    run(input=x[:1])
    network.weight.data = network.weight.data.clone() + 1
    replays.drop_stale_recordings()
    assert torch.equal(run(input=x), network(x))
    assert len(replays.recordings) == 1, "what was recorded with the old memory is gone"
    replays.drop_stale_recordings()
    assert torch.equal(run(input=x), network(x))
    assert len(replays.recordings) == 1, "and nothing else"


def test_texts_of_many_lengths_keep_a_bounded_number_of_recordings(caplog):
    """Rollouts with 100 text lengths and one common length: the common one is recorded once."""
    recorded = []

    def network(text):
        recorded.append(text.shape[1])
        return text.cumsum(1)

    def num_calls(length):  # a capture on a CPU calls the network once, and so does each replay
        return recorded.count(length)

    replays, common = GraphReplayer(network, lambda: []), torch.randn(2, 7)
    for length in range(10, 110):
        assert torch.equal(replays("old", (common,), {}), common.cumsum(1))
        text = torch.randn(2, length)
        assert torch.equal(replays("old", (text,), {}), text.cumsum(1))
        assert len(replays.recordings) <= cuda_graphs.MAX_RECORDINGS
    assert len(replays.recordings) == cuda_graphs.MAX_RECORDINGS
    assert num_calls(7) == 1 + 100, "one recording and 100 replays"
    replays("old", (torch.randn(2, 109),), {})
    assert num_calls(109) == 1 + 2, "the newest length is still recorded"
    replays("old", (torch.randn(2, 10),), {})
    assert num_calls(10) == 2 * (1 + 1), "the oldest length is recorded again"
    assert caplog.text.count("CUDA graphs are dropped") == 1


def test_a_replayed_network_behaves_like_the_network(network):
    replayed = ReplayingNetwork(network)
    assert replayed.config is network.config
    replayed.drop_stale_recordings()
    assert torch.equal(call(replayed, range(2)), call(network, range(2)))


def test_a_cpu_warns_once_that_it_has_no_graphs(network, replays, caplog):
    for numbers in (range(2), range(3)):
        call(through(replays), numbers)
    assert caplog.text.count("cpu has no CUDA graphs") == 1


@pytest.fixture
def asked(monkeypatch):
    """Replace torch.cuda by a fake that records the calls in order and does nothing."""
    asked = recorded_streams(monkeypatch, "warm-up")

    class Graph:
        def replay(self):
            asked.append("replayed")

    @contextlib.contextmanager
    def recording(graph, pool, capture_error_mode):
        asked.append(f"recording in {pool}, {capture_error_mode}")
        yield
        asked.append("recorded")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "one pool")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return asked


def test_a_gpu_warms_up_records_once_and_replays_without_a_call(asked, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "choose_capture", CudaCapture)

    def network(x):
        asked.append("called")
        return (2 * x,)

    replays = GraphReplayer(network, lambda: [])
    for _ in range(3):
        replays("old", (torch.ones(2),), {})
    called = ["on warm-up", "called", "called", "off warm-up"]
    warm_up = ["warm-up waits for main", *called, "main waits for warm-up"]
    recorded = ["recording in one pool, thread_local", "called", "recorded"]
    assert asked == [*warm_up, *recorded, "replayed", "replayed", "replayed"]
    replays("old", (torch.ones(3),), {})
    assert asked[12:] == [*warm_up, *recorded, "replayed"]


def test_a_failed_recording_names_the_key_to_change(asked):
    calls = []

    def waits():
        calls.append(1)
        if len(calls) > cuda_graphs.NUM_WARM_UPS:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    with pytest.raises(UserError, match=r"cuda_graph: .* \(operation not .* is capturing\): set it to false"):
        CudaCapture(torch.device("cuda", 0))(waits)
