import logging

import torch
from torch import nn

from wfm_ds.engine.flop_counter import FlopCount, FlopCounter, copy_to_meta


class Network(nn.Module):
    """Two layers; only the second is trainable. With `data_dependent`, the forward reads input values."""

    def __init__(self, data_dependent=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.first.requires_grad_(False)
        self.data_dependent = data_dependent

    def forward(self, hidden_states, scale=1.0):
        if self.data_dependent and hidden_states.sum().item() > 0:
            scale = 2.0
        return (self.second(self.first(hidden_states)) * scale,)


def counter(network):
    return FlopCounter(copy_to_meta(network), checkpointing=False)


def note(work, rows, tokens, differentiated):
    work.record_forward(
        (), {"hidden_states": torch.ones(rows, tokens, 4)}, with_gradient=differentiated, with_adapters=True
    )


def test_each_batch_is_counted_with_its_size_and_gradients():
    work, forward = counter(Network()), 2 * (4 * 8 + 8 * 2)
    note(work, 3, 5, differentiated=False)
    note(work, 2, 5, differentiated=False)
    note(work, 1, 7, differentiated=True)
    # The first layer is frozen and the input does not require a gradient: backward computes only the weight gradient of
    # the second layer.
    assert work.pop_count() == FlopCount(required=(5 * 5 + 7) * forward + 7 * 2 * 8 * 2, recomputed=0)
    assert work.pop_count() == FlopCount()


def test_cleared_forwards_do_not_count():
    work = counter(Network())
    note(work, 3, 5, differentiated=True)
    work.discard()
    assert work.pop_count() == FlopCount()


def test_a_network_that_reads_values_has_no_count_and_warns_once(caplog):
    work = counter(Network(data_dependent=True))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            note(work, 1, 1, differentiated=False)
            assert work.pop_count() is None
    assert [r.message.startswith("cannot count the FLOPs of this denoiser") for r in caplog.records] == [True]
