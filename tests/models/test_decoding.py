"""Order of decoding on a GPU's streams, by recorded torch.cuda calls; the CPU computes the pixels."""

import numpy as np
import pytest
import torch

from families import load_tiny, make_sampler
from streams import recorded_streams
from wfm_ds.models.sampler import get_decode_stream


@pytest.fixture(scope="module")
def sampler(tiny_pipelines):
    return make_sampler(load_tiny(tiny_pipelines("sd3"), "sd3"))


@pytest.fixture
def latents(sampler):
    latents = torch.randn(3, *sampler.latent_shape, generator=torch.Generator().manual_seed(0))
    latents[1, 0, 0, 0] = float("nan")
    return latents


@pytest.fixture
def asked(monkeypatch):
    """Record torch.cuda calls in order without executing them."""
    asked = recorded_streams(monkeypatch, "side")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: asked.append(f"{len(self)} kept for side"))
    streams = get_decode_stream
    streams.cache_clear()
    yield asked
    streams.cache_clear()


def test_a_gpu_decodes_on_a_second_stream_after_denoising(sampler, latents, asked, monkeypatch):
    want, _ = sampler.decode_to_uint8(latents)
    assert asked == []
    cpu = sampler.model.device
    with sampler.model.pipeline.vae.decoder.register_forward_hook(lambda *_: asked.append("decoded")):
        monkeypatch.setattr("wfm_ds.models.sampler.get_decode_stream", lambda device: torch.cuda.Stream(device))
        begun = sampler.start_decoding(latents)
        assert begun.is_pending
        assert asked == [
            "side waits for main",
            "on side",
            *["decoded"] * 3,
            "recorded on side",
            "off side",
            "3 kept for side",
        ]
        media, finite = begun.wait()
    assert asked[-1] == "host waits"
    assert finite == [True, False, True]
    assert np.array_equal(media, want)
    assert sampler.model.device == cpu


def test_there_is_one_stream_for_a_gpu_and_none_for_a_cpu(asked):
    assert get_decode_stream(torch.device("cpu")) is None
    assert get_decode_stream(torch.device("cuda", 0)) is get_decode_stream(torch.device("cuda", 0))
    assert get_decode_stream(torch.device("cuda", 0)) is not get_decode_stream(torch.device("cuda", 1))


def test_selected_rows_are_decoded_and_all_are_checked(sampler, latents):
    whole, finite = sampler.decode_to_uint8(latents)
    media, judged = sampler.start_decoding(latents, slice(1, 3)).wait()
    assert np.array_equal(media, whole[1:])
    assert judged == finite == [True, False, True]
    none, judged = sampler.start_decoding(latents, slice(3, 3)).wait()
    assert (len(none), judged) == (0, finite)
