"""Sound reaches rewards unchanged; `clap` compares it with the prompt, and `sound_match` with the frames."""

import importlib.util
import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from scipy.signal import resample_poly
from transformers.models.pe_audio_video.configuration_pe_audio_video import PeAudioVideoEncoderConfig

from reward_http import started_client
from reward_samples import checksum, loaded, media_batch
from wfm_ds.errors import RecipeError, RewardError
from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.tokenizers import t5_tokenizer
from wfm_ds.recipe.sections import RewardFunction
from wfm_ds.rollout.rewards import submit_finite_samples
from wfm_ds.training.reward_checks import check_reward_needs
from wfm_ds.types import Prompt
from wfm_reward.rewards.sound_match import load_model, prepare_frames

H, W = 6, 5
PROBE = "probe_rewards:Sound"


def draw_sounds(count, samples, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 2, samples)).astype(np.float32)


def draw_videos(count):
    return np.random.default_rng(1).integers(0, 256, (count, 4, H, W, 3)).astype(np.uint8)


def test_sound_reaches_the_reward_bit_for_bit_next_to_frames_and_images(tmp_path):
    videos, sounds, source = draw_videos(2), draw_sounds(2, 77), draw_videos(1)[0, 0]
    prompts = [Prompt(id="a", text="", inputs={"source": source}), Prompt(id="b", text="")]
    with started_client(tmp_path, {"name": PROBE}) as client:
        assert client.sound_rewards == [PROBE]
        submit_finite_samples(client, videos, [True, True], ["a", "b"], prompts, 8.0, (), sounds, 8000)
        submit_finite_samples(client, videos[:1], [True], ["c"], prompts[:1], 8.0)
        scores = {name: found[PROBE] for name, found in client.wait().items()}
    images = {"a": {"source": checksum(source)}, "b": {}}
    for i, name in enumerate("ab"):
        arrays = {"frames": checksum(videos[i]), "sound": checksum(sounds[i]), "rate": 8000}
        assert scores[name].parts == {**arrays, **images[name]}
    assert "missing metadata or inputs: sound" in scores["c"].failure


def test_a_reward_that_hears_needs_a_model_with_sound():
    for name in ("clap", "sound_match"):
        function = RewardFunction(name=name)
        check_reward_needs(function, [], is_local=True, makes_video=True, makes_sound=True, has_recordings=False)
        with pytest.raises(RecipeError, match=f"reward {name} scores sound, but the model generates none"):
            check_reward_needs(function, [], is_local=True, makes_video=True, has_recordings=False)


@pytest.fixture(scope="module")
def clap_folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("clap"), t5_tokenizer()
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "max_position_embeddings": 34, "pad_token_id": 0, "projection_dim": 8}
    audio = {"spec_size": 64, "num_mel_bins": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "hidden_size": 16}
    audio |= {"patch_embeds_hidden_size": 8, "num_hidden_layers": 2, "projection_dim": 8}
    config = transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=8)
    with temporary_seed(0):
        transformers.ClapModel(config).save_pretrained(folder)
    extractor = transformers.ClapFeatureExtractor(feature_size=16, max_length_s=1, truncation="rand_trunc")
    transformers.ClapProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def hear(reward, sounds, prompts, rate, metadata=None, videos=None):
    videos = draw_videos(len(sounds)) if videos is None else videos
    fields = {"reward": reward.name, "sounds": list(sounds), "sound_rate": rate}
    return reward.score(media_batch(videos, prompts, metadata, fps=8.0, **fields))


def test_clap_is_the_cosine_of_the_library_s_embeddings(clap_folder):
    reward, prompts = loaded("clap", model=str(clap_folder)), ["a red cat", "hello"]
    sounds = draw_sounds(2, 4000)
    sounds[1] *= np.linspace(0, 1, 4000, dtype=np.float32)
    model = transformers.ClapModel.from_pretrained(clap_folder).eval()
    processor = transformers.ClapProcessor.from_pretrained(clap_folder)
    mono = [resample_poly(sound.mean(0), 6, 1).astype(np.float32) for sound in sounds]
    features = processor.feature_extractor(mono, sampling_rate=48000, return_tensors="pt")
    tokens = processor.tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**features, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    want = (out.audio_embeds * out.text_embeds).sum(1).tolist()
    scores = hear(reward, sounds, prompts, 8000)
    assert [score.value for score in scores] == pytest.approx(want, abs=1e-5)
    assert scores[0].value != pytest.approx(hear(reward, sounds[::-1], prompts, 8000)[0].value, abs=1e-5)
    long = draw_sounds(2, 20_000)  # longer than CLAP hears; the library takes a random part
    assert hear(reward, long, prompts, 8000) == hear(reward, long, prompts, 8000)
    about = loaded("clap", model=str(clap_folder), prompt_key="sound")
    (told,) = hear(about, sounds[:1], ["other"], 8000, [{"sound": "a red cat"}])
    assert told.value == pytest.approx(want[0], abs=1e-5)
    (silent,) = hear(reward, 0 * sounds[:1], prompts[:1], 8000)
    assert silent.failure == "the video is silent"


SETTINGS = {"size": (28, 28), "mean": [0.4, 0.5, 0.6], "std": [0.5, 0.25, 0.5], "num_frames": None}


def build_pe_av():
    """Return a tiny PE-AV with random weights. A ViT of transformers replaces the network of timm."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"head_dim": 16}
    vision = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    vision.image_size, vision.patch_size, vision.num_labels = 28, 14, 8
    dac = transformers.DacConfig(encoder_hidden_size=8, downsampling_ratios=[2, 8, 10, 12], codebook_dim=8)
    audio = transformers.PeAudioEncoderConfig(dac_config=dac, **small)
    video = transformers.PeVideoEncoderConfig(vision_config=vision, **small)
    text = transformers.ModernBertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    text.num_attention_heads = 2
    both = PeAudioVideoEncoderConfig(audio_config=audio, video_config=video, **small)
    with temporary_seed(0):
        model = transformers.PeAudioVideoModel(
            transformers.PeAudioVideoConfig(text_config=text, audio_video_config=both)
        ).eval()
        for weights in model.parameters():  # with the default initialization, the cosine hardly depends on the sound
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.3)
    return model


@pytest.fixture
def pe_av(tmp_path, monkeypatch):
    """Return (a tiny PE-AV, a folder from which sound_match loads it)."""
    try:
        model = build_pe_av()
    except ImportError as error:  # transformers 5.17 builds the default configuration too
        pytest.skip(str(error))
    report = {"missing_keys": {"text_model.embeddings"}}
    monkeypatch.setattr(transformers.PeAudioVideoModel, "from_pretrained", lambda path, **options: (model, report))
    write_pe_av_settings(tmp_path)
    return model, tmp_path


def write_pe_av_settings(folder, num_frames=None):
    """Write the files of a released PE-AV except the weights."""
    vision = {"model_type": "timm_wrapper", "num_classes": 8, "label_names": list("abcdefgh")}
    config = {"model_type": "pe_audio_video", "audio_video_config": {"video_config": {"vision_config": vision}}}
    (folder / "config.json").write_text(json.dumps(config))
    video = {"size": {"height": 28, "width": 28}, "image_mean": SETTINGS["mean"], "image_std": SETTINGS["std"]}
    video |= {"do_sample_frames": num_frames is not None, "num_frames": num_frames}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    transformers.PeAudioFeatureExtractor().save_pretrained(folder)


def test_sound_match_is_the_cosine_of_the_library_s_embeddings(pe_av):
    model, folder = pe_av
    reward, sounds, videos = loaded("sound_match", model=str(folder)), draw_sounds(2, 4000), draw_videos(2)
    sounds[1] *= np.linspace(0, 1, 4000, dtype=np.float32)
    mono = [resample_poly(sound.mean(0), 3, 1).astype(np.float32) for sound in sounds]
    audio = transformers.PeAudioFeatureExtractor()(mono, sampling_rate=48_000, return_tensors="pt")

    def library_cosines(frames):
        pixels = torch.stack([prepare_frames(video, SETTINGS) for video in frames])
        with torch.no_grad():
            out = model(pixel_values_videos=pixels, **audio)  # both videos in one batch, with a padding mask
        return torch.cosine_similarity(out.audio_embeds, out.video_embeds).tolist()

    scores = [score.value for score in hear(reward, sounds, None, 16_000, videos=videos)]
    assert scores == pytest.approx(library_cosines(videos), abs=1e-5)
    assert scores[0] != pytest.approx(hear(reward, sounds[::-1], None, 16_000, videos=videos)[0].value, abs=1e-2)
    assert scores[0] != pytest.approx(hear(reward, sounds, None, 16_000, videos=videos[::-1])[0].value, abs=1e-2)
    write_pe_av_settings(folder, num_frames=3)
    sampled = hear(loaded("sound_match", model=str(folder)), sounds, None, 16_000, videos=videos)
    assert [score.value for score in sampled] == pytest.approx(library_cosines(videos[:, [0, 1, 3]]), abs=1e-5)
    (silent,) = hear(reward, 0 * sounds[:1], None, 16_000)
    assert silent.failure == "the video is silent"


def test_sound_match_prepares_frames_as_pillow_does():
    """Pillow and torch filter alike; each rounds to whole pixel values. torchvision, which the stock processor uses,
    calls the function of torch."""
    for shape in ((5, 40, 61, 3), (2, 300, 200, 3), (1, 20, 17, 3)):
        frames = np.random.default_rng(2).integers(0, 256, shape).astype(np.uint8)
        small = [np.asarray(Image.fromarray(frame).resize((28, 28), Image.Resampling.BILINEAR)) for frame in frames]
        want = (np.stack(small) / 255 - SETTINGS["mean"]) / SETTINGS["std"]
        found = prepare_frames(frames, SETTINGS).permute(0, 2, 3, 1).numpy()
        assert np.abs((found - want) * SETTINGS["std"]).max() * 255 < 1.001


def test_sound_match_loads_the_number_of_outputs_and_names_what_is_missing(pe_av, monkeypatch):
    _, folder = pe_av
    configs, report = [], {"missing_keys": {"text_model.a", "video_model.video_encoder.norm.weight"}}

    def load(path, config, **options):
        configs.append(config)
        return None, report

    monkeypatch.setattr(transformers.PeAudioVideoModel, "from_pretrained", load)
    with pytest.raises(RewardError, match=r"1 weights are missing, such as video_model\.video_encoder\.norm"):
        loaded("sound_match", model=str(folder))
    assert configs[0].audio_video_config.video_config.vision_config.num_labels == 8
    with pytest.raises(RewardError, match="the model /nowhere/pe cannot be loaded"):
        loaded("sound_match", model="/nowhere/pe")
    monkeypatch.undo()
    if importlib.util.find_spec("timm") is None:
        save_file({}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ImportError, match=r"timm.*pip install 'wfm_ds\[reward-sound\]'"):
            load_model(str(folder), torch.float32)
