"""Generated samples with their metadata, as files, a grid, a table or an animation."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.monitoring.media_files import (
    ImageArray,
    SoundArray,
    VideoArray,
    image_grid,
    reduce_image,
    save_mp4,
    save_png,
)
from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none
from wfm_ds.types import MASK, SOURCES, Prompt

SAMPLES_FILE = "samples.jsonl"
MIN_CELL = 64  # pixels; smaller samples are enlarged in the grid to be visible
# Limits that keep pages with many animations small: a GIF has about half a byte per pixel and frame.
MAX_ANIMATED_CELL, MAX_ANIMATED_FRAMES = 160, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSample:
    prompt: str
    prompt_id: str
    seed: int  # seed of the initial noise
    pixels: npt.NDArray[np.uint8]  # image [H,W,3] or video [T,H,W,3]
    fps: float | None = None  # only for a video
    rewards: Mapping[str, float | None] = field(default_factory=dict)  # by name; None if the reward failed
    parts: Mapping[str, float] = field(default_factory=dict)  # {`reward/part`: entry of Score.parts}
    images: Mapping[str, ImageArray] = field(default_factory=dict)  # input images, such as the `source` of an edit
    sound: SoundArray | None = None  # of a video
    sound_rate: int | None = None  # samples per second of `sound`

    @property
    def frames(self) -> VideoArray:
        """The frames as a video [T,H,W,3]. T is 1 for an image."""
        return self.pixels if self.pixels.ndim == 4 else self.pixels[None]

    @property
    def is_video(self) -> bool:
        return len(self.frames) > 1


def list_sample_folders(output_dir: Path) -> dict[int, Path]:
    """Return {step: folder} of a run's validation samples, sorted by step. Folders with other names are ignored."""
    folders = [path for path in (output_dir / "samples").glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return {step: path for step, path in sorted((int(path.name.removeprefix("step_")), path) for path in folders)}


def write_samples(folder: Path, samples: Sequence[GeneratedSample]) -> None:
    """Replace `folder` atomically by a folder with samples.jsonl and one PNG or MP4 file per sample. Raises OSError."""
    with atomic.new_folder(folder) as temporary:
        write_table(temporary, [write_sample_file(temporary, number, sample) for number, sample in enumerate(samples)])


def select_images(prompt: Prompt) -> dict[str, ImageArray]:
    """Return the input images of a prompt by name, sources first."""
    return {name: prompt.inputs[name] for name in (*SOURCES, MASK) if name in prompt.inputs}


def write_sample_file(folder: Path, number: int, sample: GeneratedSample) -> dict[str, Any]:
    """Write a sample and its input images. Return its line of samples.jsonl."""
    name = f"{number:04d}.{'mp4' if sample.is_video else 'png'}"
    line: dict[str, Any] = {"file": name, "prompt": sample.prompt, "prompt_id": sample.prompt_id, "seed": sample.seed}
    if sample.is_video:
        assert sample.fps is not None, f"{name}: a video needs its frames per second"
        save_mp4(folder / name, sample.frames, sample.fps, sample.sound, sample.sound_rate)
        line["fps"] = sample.fps
    else:
        save_png(folder / name, sample.frames[0])
    rewards = {key: None if value is None else finite_or_none(value) for key, value in sample.rewards.items()}
    parts = {key: finite_or_none(value) for key, value in sample.parts.items()}
    images = {key: write_input_image(folder, key, image) for key, image in sample.images.items()}
    return {**line, "rewards": rewards} | ({"parts": parts} if parts else {}) | ({"images": images} if images else {})


def write_input_image(folder: Path, name: str, image: ImageArray) -> str:
    """Write an input image, unless an earlier sample has the same one. Returns the name of the file."""
    file = f"{name}_{blake2b(image.tobytes(), digest_size=6).hexdigest()}.png"
    if not (folder / file).exists():
        save_png(folder / file, image)
    return file


def write_table(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    atomic.write_text(folder / SAMPLES_FILE, text)


def group_by_prompt(samples: Sequence[GeneratedSample]) -> list[GeneratedSample]:
    first_index: dict[str, int] = {}
    for index, sample in enumerate(samples):
        first_index.setdefault(sample.prompt_id, index)
    return sorted(samples, key=lambda sample: first_index[sample.prompt_id])


def sample_grid(samples: Sequence[GeneratedSample]) -> ImageArray:
    """Draw the first frame of each sample in a grid, with its rewards below. Returns [H,W,3] uint8.

    The grid has one row per prompt if all prompts have the same number of samples. Otherwise, it is a square.
    """
    return _draw_grid(samples, [sample.frames[0] for sample in samples])


def sample_animation(samples: Sequence[GeneratedSample]) -> tuple[VideoArray, float]:
    """Return the sample grid as (video [T,H,W,3] uint8, its fps). At least one sample must be a video.

    Samples are scaled down. Long videos are reduced to every k-th frame. Shorter samples repeat their last frame.
    """
    fps = next(sample.fps for sample in samples if sample.fps is not None)
    longest = max(len(sample.frames) for sample in samples)
    stride = -(-longest // MAX_ANIMATED_FRAMES)
    frames = [
        [reduce_image(s.frames[min(t, len(s.frames) - 1)], MAX_ANIMATED_CELL) for s in samples]
        for t in range(0, longest, stride)
    ]
    return np.stack([_draw_grid(samples, cells) for cells in frames]), fps / stride


def _draw_grid(samples: Sequence[GeneratedSample], cells: Sequence[ImageArray]) -> ImageArray:
    counts = {len(list(group)) for _, group in itertools.groupby(samples, key=lambda sample: sample.prompt_id)}
    per_prompt = counts.pop() if len(counts) == 1 else 1
    columns = per_prompt if per_prompt > 1 else max(1, round(len(samples) ** 0.5))
    scale = max(1, -(-MIN_CELL // min(min(image.shape[:2]) for image in cells)))
    titles = [samples[row].prompt for row in range(0, len(samples), columns)] if per_prompt > 1 else None
    labels = [" ".join(format_reward(value) for value in sample.rewards.values()) for sample in samples]
    return image_grid(cells, columns, scale=scale, labels=labels if any(labels) else None, row_titles=titles)


def format_reward(value: float | None) -> str:
    return "failed" if value is None else f"{value:.3g}"


def sample_table(samples: Sequence[GeneratedSample]) -> str:
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    lines = [["", "prompt", "seed", *names], ["---"] * (3 + len(names))]
    for number, sample in enumerate(samples):
        rewards = [format_reward(sample.rewards[name]) if name in sample.rewards else "" for name in names]
        lines.append([str(number), escape_cell(sample.prompt), str(sample.seed), *rewards])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escape_cell(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]()#!|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
