"""LTX-2: video and sound in one vector of latents, guidance with up to four passes, and files with sound."""

import av
import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

import families
from families import CASES, joined_latents, load_reference_pipeline, load_tiny, ltx2_latents, sample_latents
from wfm_ds.cli.main import main
from wfm_ds.errors import ModelError
from wfm_ds.models.ltx2 import log_mel
from wfm_ds.types import Prompt, SoundClip

PROMPTS = [Prompt(id="a", text="a red circle"), Prompt(id="b", text="a cat", negative_text="a dog")]
SEEDS, SIZE, STEPS = [3, 4], (32, 64, 5), 4
STOCK_GUIDANCE = {"audio_scale": 7.0, "stg_blocks": [1], "modality_scale": 3.0, "rescale": 0.7}


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("ltx2"), "ltx2")


def make_sampler(model, **settings):
    sampler = families.make_sampler(model, SIZE, **{"eval_steps": STEPS, **settings})
    model.check_sampling(sampler.settings)
    return sampler


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"guidance_scale": 1.0}, 1),
        ({"guidance_scale": 3.0}, 2),
        ({"guidance_scale": 3.0, "guidance": {"rescale": 0.5}}, 2),
        ({"guidance_scale": 3.0, "guidance": STOCK_GUIDANCE}, 4),
    ],
)
@pytest.mark.slow
def test_latents_pixels_and_sound_equal_the_diffusers_pipeline(settings, passes, model, tiny_pipelines):
    """With its own noise, and with the defaults of its guidance in the last case."""
    pipeline = load_reference_pipeline(tiny_pipelines("ltx2"), CASES["ltx2"])
    sampler = make_sampler(model, **settings)
    guidance = sampler.settings.guidance
    call = model.pipeline_call_kwargs(sampler.settings.guidance_scale, *SIZE)
    call |= {"guidance_rescale": guidance.rescale, "audio_guidance_rescale": guidance.rescale}
    if passes == 4:  # the defaults of the pipeline
        call = {name: value for name, value in call.items() if "scale" not in name}
    call |= {"prompt": [prompt.text for prompt in PROMPTS], "negative_prompt": ["", "a dog"]}

    def run(output_type):
        generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
        more = {"num_inference_steps": STEPS, "spatio_temporal_guidance_blocks": [1], "output_type": output_type}
        return pipeline(**call, **more, generator=generators)

    got = sample_latents(sampler, PROMPTS, SEEDS)
    assert sampler.forward.counts == {"sample": passes * STEPS}
    want = ltx2_latents(model, joined_latents(run("latent")))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    played = run("pt")
    torch.testing.assert_close(model.decode_latents(got), played.frames.movedim(2, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.decode_sound(got), played.audio, rtol=0, atol=1e-5)
    assert played.audio.std() > 0.01
    for i in range(2):
        alone = sample_latents(sampler, PROMPTS[i : i + 1], SEEDS[i : i + 1])
        torch.testing.assert_close(alone, got[i : i + 1], rtol=0, atol=1e-4)


def test_joined_streams_split_to_the_same_streams(model):
    shape = model.latent_shape(*SIZE)
    streams = model.streams(*SIZE)
    assert (streams.video, streams.audio) == ((4, 3, 4, 8), (2, 8, 2))
    latents = torch.randn(2, *shape)
    parts = model.split(latents)
    assert torch.equal(model.join(parts), latents)
    assert (parts["video"].shape[1:], parts["audio"].shape[1:]) == (streams.video, streams.audio)
    assert model.grid_size(shape) == (4, 8)


def test_sound_of_clips_is_encoded_as_by_the_audio_vae(model):
    """The spectrogram is compared with that of transformers in float64, the latents with a direct call of the VAE."""
    config, net = model.pipeline.audio_vae.config, model.pipeline.audio_vae
    height, width, frames = SIZE
    rate, draws = model.clip_sound_rate, np.random.default_rng(0)
    count = round(frames / model.fps * rate)
    sounds = draws.uniform(-0.5, 0.5, (2, 2, count)).astype(np.float32)
    filters = mel_filter_bank(513, config.mel_bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    window = window_function(1024, "hann")
    options = {"frame_length": 1024, "hop_length": config.mel_hop_length, "power": 1.0, "mel_filters": filters}

    def log_spectrogram(channel):
        return np.log(spectrogram(channel.astype(np.float64), window, mel_floor=1e-5, **options).T)

    want = [[log_spectrogram(channel) for channel in sound] for sound in sounds]
    mel = log_mel(torch.from_numpy(sounds), rate, config.mel_hop_length, config.mel_bins)
    torch.testing.assert_close(mel.double(), torch.tensor(np.array(want)), rtol=1e-4, atol=1e-4)

    videos = draws.integers(0, 256, (2, frames, height, width, 3), np.uint8)
    clips = [SoundClip(video, sound) for video, sound in zip(videos, sounds, strict=True)]
    got, silent = model.encode_uint8(clips), model.encode_uint8(list(videos))
    parts = model.split(got)
    assert torch.equal(parts["video"], model.split(silent)["video"])
    assert (model.split(silent)["audio"] == 0).all()
    with torch.no_grad():
        z = net.encode(torch.tensor(np.array(want)).float()).latent_dist.mean[:, :, : parts["audio"].shape[2]]
    mean, std = (x.view(z.shape[1], 1, z.shape[3]) for x in (net.latents_mean, net.latents_std))
    torch.testing.assert_close(parts["audio"], (z - mean) / std, rtol=1e-3, atol=1e-3)
    assert torch.equal(model.encode_uint8(clips[:1]), got[:1])


def test_sizes_with_equally_many_elements_are_refused(tiny_pipelines):
    model = load_tiny(tiny_pipelines("ltx2"), "ltx2")
    shape = model.latent_shape(32, 64, 5)
    model.latent_shape(64, 32, 5)
    with pytest.raises(ValueError, match=r"use are \[4, 3, 4, 8\] and \[4, 3, 8, 4\], but exactly one must fit"):
        model.num_tokens(shape)
    with pytest.raises(ModelError, match="max_sequence_length 12 must be a multiple of 8"):
        load_tiny(tiny_pipelines("ltx2"), "ltx2", max_sequence_length=12)
    with pytest.raises(ValueError, match="1 frames at 60 fps are too short for sound"):
        load_tiny(tiny_pipelines("ltx2"), "ltx2", fps=60.0).latent_shape(32, 32, 1)


def test_guidance_settings_that_do_not_fit_are_refused(model, tiny_pipelines):
    for key, value in STOCK_GUIDANCE.items():
        with pytest.raises(ModelError, match=f"wan has no sampling.guidance.{key}: remove it"):
            make_sampler(load_tiny(tiny_pipelines("wan21"), "wan21"), guidance_scale=2.0, guidance={key: value})
    with pytest.raises(ModelError, match=r"stg_blocks \[2\]: the blocks are 0 to 1"):
        make_sampler(model, guidance_scale=2.0, guidance={"stg_blocks": [2]})
    with pytest.raises(ModelError, match=r"has no sampling.guidance.skip_layers"):
        make_sampler(model, guidance_scale=2.0, guidance={"skip_layers": [1]})


def test_generated_files_have_the_sound(model, tiny_pipelines, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    argv = ["--model", str(tiny_pipelines("ltx2")), "--prompts", str(tmp_path / "prompts.txt"), "--seeds", "3"]
    argv += ["--height", "32", "--width", "64", "--frames", "5", "--steps", "2", "--guidance", "1"]
    assert main(["generate", *argv, "--out", str(tmp_path / "out")]) == 0
    sampler = make_sampler(model, guidance_scale=1.0, eval_steps=2)
    want = sampler.decode_sound(sample_latents(sampler, PROMPTS[:1], [3]))[0]
    with av.open(str(tmp_path / "out" / "0000.mp4")) as container:
        stream = container.streams.audio[0]
        got = np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1)
    assert (stream.rate, len(got)) == (model.sound_rate, 2)
    assert got.shape[1] >= want.shape[1]
    assert np.corrcoef(got[:, : want.shape[1]].ravel(), want.ravel())[0, 1] > 0.9  # AAC is lossy
