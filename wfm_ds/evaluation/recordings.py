"""Similarity of generated clips to the recording that they should continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.media import load_pixels
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.samples import IMAGE_SUFFIXES, Media, Sample
from wfm_ds.types import Score
from wfm_reward.similarity import SSIM_WINDOW, psnr, ssim

RECORDING = "recording"  # prefix of the measures' names in metrics and reports
Similarity = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """The videos of data samples, resized and cropped like their conditioning frames."""

    media: dict[str, Media]  # {prompt id: video}
    framing: Framing  # size and crop, for all frames of all clips
    layout: ClipLayout
    measures: dict[str, Similarity]  # {name: measure}

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], framing: Framing, layout: ClipLayout, num_clips: int
    ) -> Recordings | None:
        media = {s.prompt.id: s.media for s in samples if s.media.suffix not in IMAGE_SUFFIXES}
        if not media:
            return None
        measures: dict[str, Similarity] = {f"{RECORDING}/psnr": psnr}
        if min(framing.height, framing.width) >= SSIM_WINDOW:
            measures[f"{RECORDING}/ssim"] = ssim
        total = replace(framing, num_frames=layout.total_frames(num_clips), span=None)
        return cls(media=media, framing=total, layout=layout, measures=measures)

    def load(self, prompt_id: str) -> npt.NDArray[np.uint8] | str:
        """Return the recorded frames of all clips, uint8 [total_frames,H,W,3], or an error message."""
        if prompt_id not in self.media:
            return "no recording: the sample is an image"
        try:
            return load_pixels(self.media[prompt_id], self.framing, draw_centre)
        except BadMedia as error:
            return str(error)

    def score_clip(
        self, sample_id: str, video: npt.NDArray[np.uint8], clip: int, recording: npt.NDArray[np.uint8] | str
    ) -> dict[str, Score]:
        """Return {measure: Score} of a generated clip [F,H,W,3].

        The first max(1, layout.overlap) frames are not scored, because they may be conditioning frames. recording:
        result of `load`. If it is an error message, all scores are failures with this message.
        """
        if isinstance(recording, str):
            return {n: Score(sample_id=sample_id, reward=n, failure=recording) for n in self.measures}
        start, skipped = self.layout.first_frame(clip), max(1, self.layout.overlap)
        recorded = recording[start + skipped : start + self.layout.num_frames]
        return {
            name: Score(sample_id=sample_id, reward=name, value=measure(video[skipped:], recorded))
            for name, measure in self.measures.items()
        }
