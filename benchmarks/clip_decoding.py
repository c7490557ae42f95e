"""Time and bytes read per clip of a long video: `python -m benchmarks.clip_decoding [--frames 6000] [--clips 20]`.

Encodes a video of 640 x 360 pixels at 30 fps. Then reads random clips of 17 frames with their frame indices, as
training with actions does, in three ways in turn: `all packets` finds the frames by reading every packet, as for files
without a complete index; `index` reads the index of the file; `episode` knows the frame rate, as in LeRobot datasets.
The pixels must be equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import numpy.typing as npt

from benchmarks.report import describe_machine, format_table, summarize, write_results
from wfm_ds.data import media
from wfm_ds.data.episode import CameraSpan, EpisodeVideo
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile, Media
from wfm_ds.program import run_command

HEIGHT, WIDTH, FPS, NUM_FRAMES = 360, 640, 30, 17
CODECS = {
    "AV1, keyframe every 2": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12", "svtav1-params": "lp=1"}),
    "H.264, keyframe every 60, B-frames": ("libx264", {"g": "60", "bf": "2", "crf": "18", "preset": "veryfast"}),
}


def write_video(path: Path, num_frames: int, codec: str, options: dict[str, str]) -> None:
    """Encode a coarse pattern that moves sideways under noise."""
    draws = np.random.default_rng(0)
    scene = draws.integers(0, 240, (HEIGHT // 8, WIDTH // 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(FPS), options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for i in range(num_frames):
            shift = round(WIDTH / 2 * (1 + np.sin(i / 20)))
            picture = scene[:, shift : shift + WIDTH] + draws.integers(0, 9, (HEIGHT, WIDTH, 1), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def read_clip(video: Media, share: float) -> npt.NDArray[np.uint8]:
    framing = Framing(height=HEIGHT, width=WIDTH, num_frames=NUM_FRAMES)
    media.clip_frames(video, framing, lambda purpose: share)
    return media.load_clip(video, framing, lambda purpose: share)


def bytes_read() -> int:
    """Return the number of bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure_ways(path: Path, num_frames: int, num_clips: int) -> list[dict[str, Any]]:
    """Return a row for each way of reading. The ways take turns, so a busy machine slows all of them."""
    episode = EpisodeVideo("episode", ((CameraSpan(str(path), 0.0),),), FPS, 0, num_frames)
    ways: dict[str, Media] = {"all packets": LocalFile(path), "index": LocalFile(path), "episode": episode}
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for share in np.random.default_rng(1).random(num_clips):
        pictures = []
        for way, video in ways.items():
            with patch.object(media, "read_index", (lambda *_: None) if way == "all packets" else media.read_index):
                num_bytes, start = bytes_read(), time.perf_counter()
                pictures.append(read_clip(video, share))
                costs[way].append((1000 * (time.perf_counter() - start), (bytes_read() - num_bytes) / 2**20))
        assert all((picture == pictures[0]).all() for picture in pictures)
    return [
        {
            "way": way,
            "ms per clip": summarize(ms for ms, _ in cost),
            "MiB read per clip": summarize(mib for _, mib in cost),
        }
        for way, cost in costs.items()
    ]


def run(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for coding, (codec, options) in CODECS.items():
            path = Path(folder) / f"{codec}.mp4"
            write_video(path, args.frames, codec, options)
            size = {"coding": coding, "frames": args.frames, "file MiB": path.stat().st_size / 2**20}
            rows += [size | row for row in measure_ways(path, args.frames, args.clips)]
    sys.stdout.write(format_table(rows) + "\n")
    if args.write:
        write_results("decoding", describe_machine(), rows)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--frames", type=int, default=6000)
    p.add_argument("--clips", type=int, default=20)
    p.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    return run_command(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
