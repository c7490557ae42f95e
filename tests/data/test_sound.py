"""The sound of video clips: position, rate, channels, silence, and clips without sound."""

from pathlib import Path

import av
import numpy as np
import pytest

from wfm_ds.data.media import load_media, load_pixels
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.samples import LocalFile, Sample
from wfm_ds.types import Prompt

FPS, FRAMES, SIDE = 24, 72, 16
PITCHES = (440.0, 990.0)  # of the left and the right channel, in Hz


def framing(**keys):
    return Framing(**{"height": SIDE, "width": SIDE, "num_frames": 17, "fps": FPS, "sound_rate": 16000, **keys})


def tones(seconds, channels=2):
    return np.stack([0.4 * np.sin(2 * np.pi * pitch * seconds) for pitch in PITCHES[:channels]])


def write(path, *, rate=48000, channels=2, start=0.0, end=3.0, codec="pcm_s16le"):
    """Write 3 s of numbered grey frames with tones from `start` to `end`. channels: 0 for a file without sound."""
    with av.open(str(path), "w") as container:
        name, pixels = ("ffv1", "bgr0") if path.suffix == ".mkv" else ("png", "rgb24")
        video = container.add_stream(name, rate=FPS)
        video.width, video.height, video.pix_fmt = SIDE, SIDE, pixels
        audio = container.add_stream(codec, rate=rate, layout=["mono", "stereo"][channels - 1]) if channels else None
        for i in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(np.full((SIDE, SIDE, 3), 3 * i, np.uint8), format="rgb24")
            container.mux(video.encode(frame.reformat(format=pixels)))
        container.mux(video.encode(None))
        if channels:
            samples = tones(np.arange(round(start * rate), round(end * rate)) / rate, channels)
            samples = np.rint(samples * 32767).astype(np.int16)
            sound = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T).reshape(1, -1), "s16", audio.layout.name)
            sound.sample_rate, sound.pts = rate, round(start * rate)
            container.mux(audio.encode(sound))
            container.mux(audio.encode(None))
    return LocalFile(path)


def test_the_sound_begins_with_the_first_frame_of_the_clip(tmp_path):
    """Matroska rounds times to milliseconds, so that its sound may begin up to a millisecond earlier or later."""
    for name, rate, channels, codec in (
        ("a.mov", 48000, 2, "pcm_s16le"),
        ("b.mov", 44100, 2, "pcm_s16le"),
        ("c.mov", 16000, 2, "pcm_s16le"),
        ("d.mov", 22050, 1, "pcm_s16le"),
        ("e.mkv", 44100, 2, "flac"),
    ):
        media = write(tmp_path / name, rate=rate, channels=channels, codec=codec)
        for position in (0.0, 0.37, 0.999):
            clip = load_media(media, framing(), lambda purpose, u=position: u)
            assert np.array_equal(clip.frames, load_pixels(media, framing(), lambda purpose, u=position: u))
            assert (clip.sound.dtype, clip.sound.shape) == (np.float32, (2, round(17 / FPS * 16000)))
            seconds = clip.frames[0, 0, 0, 0] / 3 / FPS + np.arange(clip.sound.shape[1]) / 16000
            shifts = np.linspace(-1e-3, 1e-3, 201) if name == "e.mkv" else [0.0]
            # The resampler sees silence beyond both ends of the clip.
            errors = [np.abs(clip.sound - tones(seconds + shift, channels))[:, 100:-100].max() for shift in shifts]
            half_a_sample = 0.4 * 2 * np.pi * max(PITCHES) * 0.5 / rate
            assert min(errors) < half_a_sample + (2e-2 if name == "e.mkv" else 2e-3), (name, position)


def test_other_frame_rates_keep_the_duration(tmp_path):
    media = write(tmp_path / "a.mov")
    clip = load_media(media, framing(fps=8), draw_centre)
    assert clip.sound.shape == (2, round(17 / 8 * 16000))
    assert list(np.diff(clip.frames[:, 0, 0, 0].astype(int))) == [9] * 16
    want = tones(clip.frames[0, 0, 0, 0] / 3 / FPS + np.arange(clip.sound.shape[1]) / 16000)
    assert np.abs(clip.sound - want)[:, 100:-100].max() < 2e-3


def test_parts_without_sound_are_silent(tmp_path):
    last, first = (lambda purpose: 0.999), (lambda purpose: 0.0)
    ends_early, begins_late = write(tmp_path / "a.mov", end=2.6), write(tmp_path / "b.mov", start=0.3)
    sound = load_media(ends_early, framing(), last).sound
    start = 55 / FPS
    silent = round((2.6 - start) * 16000)
    assert np.abs(sound[:, silent + 100 :]).max() < 1e-3
    assert np.abs(sound[:, : silent - 100] - tones(start + np.arange(silent - 100) / 16000))[:, 100:].max() < 2e-3
    sound = load_media(begins_late, framing(), first).sound
    assert np.abs(sound[:, : round(0.3 * 16000) - 100]).max() < 1e-3
    assert np.abs(sound[:, round(0.3 * 16000) + 100 :]).max() > 0.3


def test_clips_without_sound_are_counted_and_replaced(tmp_path):
    late, silent, good = write(tmp_path / "a.mov", start=2.5), write(tmp_path / "b.mov", channels=0), tmp_path / "c.mov"
    write(good)
    with pytest.raises(
        BadMedia, match=r"b\.mov: has no sound, but the model is trained on video with sound \(no_sound"
    ):
        load_media(silent, framing(), draw_centre)
    with pytest.raises(BadMedia, match=r"a\.mov: has no sound from 1\.12 s to 1\.83 s \(no_sound"):
        load_media(late, framing(), draw_centre)
    assert load_media(silent, framing(sound_rate=None), draw_centre).shape == (17, SIDE, SIDE, 3)
    samples = [
        Sample(id=Path(file).name, media=LocalFile(file), prompt=Prompt(id="p", text="a tone"))
        for file in (late.file, silent.file, good)
    ]
    source = BatchSource(
        samples, global_batch=3, seed=0, shuffle=False, framings=[framing(clip="centre")], max_bad_fraction=0.9
    )
    try:
        batch = source.read_batch(1, 0, 1)
    finally:
        source.close()
    assert {sample.sample_id for sample in batch} == {"c.mov"}
    assert source.bad["no_sound"] >= 2
