"""Latents sent over HTTP: a separate process decodes them, then rewards score them as videos."""

import numpy as np
import pytest
import torch

from reward_http import Http, serving
from wfm_ds.errors import RewardError
from wfm_ds.models.tiny.vaes import wan_vae
from wfm_ds.models.vae import decode_normalized
from wfm_reward.decoder import LatentDecoder, VaeScale
from wfm_reward.web.cosmos_protocol import widen_bfloat16


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    model = wan_vae(seed=0)
    model.save_pretrained(folder / "vae")
    return folder, model.eval()


def a_latent(seed=0, shape=(4, 2, 3, 5)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected(model, latent):
    with torch.inference_mode():
        pixels = decode_normalized(model, torch.from_numpy(latent)[None])[0]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def test_a_decoder_makes_the_video_that_the_models_vae_makes(vae, tmp_path):
    folder, model = vae
    for path in (folder, folder / "vae"):
        decoder = LatentDecoder(str(path), "cpu", "float32", 4, str(tmp_path))
        video = decoder.decode_latents(a_latent())
        assert (video.shape, video.dtype) == ((5, 24, 40, 3), np.uint8)
        assert np.abs(video.astype(int) - expected(model, a_latent())).max() <= 1
        assert VaeScale.from_vae_config(4, str(path)).video_bytes(a_latent().shape) == video.nbytes
    assert decoder._decode_to_file(np.full((4, 1, 2, 2), np.nan, np.float32))[1] == "latents are not finite"


def test_a_vae_of_other_latents_or_none_is_named(vae, tmp_path):
    folder, _ = vae
    with pytest.raises(RewardError, match=r"latent_decoders\.16\.vae: .* has 4 channels"):
        LatentDecoder(str(folder), "cpu", "float32", 16, str(tmp_path))
    with pytest.raises(RewardError, match="cannot be loaded"):
        LatentDecoder(str(tmp_path / "none"), "cpu", "float32", 16, str(tmp_path))
    with pytest.raises(RewardError, match=r"latent_decoders\.16\.vae: .*none/config\.json cannot be read"):
        VaeScale.from_vae_config(16, str(tmp_path / "none"))


def test_bfloat16_seen_as_bytes_is_widened():
    values = torch.randn(2, 3, 4).to(torch.bfloat16)
    assert (widen_bfloat16(values.view(torch.uint8).numpy()) == values.float().numpy()).all()


@pytest.mark.slow
def test_latents_over_http_are_scored_as_the_videos_that_they_are(vae, tmp_path):
    folder, model = vae
    config = {
        "pipes": {"folder": str(tmp_path / "s")},
        "http": {"bind": "127.0.0.1:0", "max_pending_mib": 1},
        "latent_decoders": {4: {"vae": str(folder)}},
        "rewards": {"mock": {}, "motion": {}},
    }
    latents = np.stack([a_latent(0), a_latent(1)])
    half = torch.from_numpy(latents).to(torch.bfloat16)
    spoilt = latents.copy()
    spoilt[0, 0, 0, 0, 0] = np.inf
    fields = {"prompts": ["a", "b"], "reward_fn": {"motion": 1, "mock": 1}, "video_infos": [{"video_fps": 16}] * 2}

    def motion_of(latent):
        frames = expected(model, latent).astype(float)
        return np.abs(np.diff(frames, axis=0)).mean() / 255

    (tmp_path / "s").mkdir(mode=0o700)
    stale = tmp_path / "s" / "video-of-a-killed-service.npy"
    stale.touch()
    with serving(tmp_path, config) as (_, said):
        assert not stale.exists()
        http = Http(said["http"], None)
        for body, meant in ((latents, latents), (half.view(torch.uint8).numpy(), half.float().numpy())):
            answer = http.scores({**fields, "media_type": "latent"}, body, "motion")
            assert answer["scores"]["motion"] == pytest.approx([motion_of(one) for one in meant], abs=2e-3)
            assert float(answer["decoded_duration"]) > 0
        answer = http.scores(fields, spoilt.astype(np.float16), "motion")
        assert answer["failures"] == [{"index": 0, "reason": "latents are not finite"}]
        assert answer["scores"]["motion"][1] == pytest.approx(motion_of(latents[1]), abs=3e-3)
        assert list((tmp_path / "s").glob("*.npy")) == [], "what was fetched is removed"
        long = np.zeros((2, 4, 30, 8, 8), np.float16)  # 30 KiB of latents for two videos of 1.4 MiB
        status, content, _ = http.enqueue(fields | {"media_type": "latent"}, long)
        assert (status, content["error"]["code"]) == (413, "too_large")
        wide = np.zeros((1, 16, 1, 2, 2), np.float16)
        status, content, _ = http.enqueue(fields | {"prompts": ["a"], "video_infos": [{}]}, wide)
        assert (status, content["message"]) == (
            422, "latents with 16 channels; this service has decoders for 4 channels: send pixels"
        )  # fmt: skip
    assert not (tmp_path / "s").exists()
