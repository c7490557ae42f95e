"""Positions of the clips in long videos, which are generated clip by clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wfm_ds.data.inputs import InputReader
from wfm_ds.data.trajectories import ACTIONS, INTRINSICS, POSES, Floats
from wfm_ds.types import Prompt


@dataclass(frozen=True, slots=True)
class ClipLayout:
    """Positions of the clips in a long video. The clips have equal lengths and overlap. The first clip is clip 0."""

    num_frames: int  # pixel frames of a clip
    overlap: int = 0  # first frames of a clip that are the last frames of the clip before it; 0: single clips
    num_latents: int = 0  # latent frames that the overlapping frames are encoded to

    def total_frames(self, num_clips: int) -> int:
        return self.first_frame(num_clips - 1) + self.num_frames

    def first_frame(self, clip: int) -> int:
        return clip * (self.num_frames - self.overlap)

    def slice_inputs(self, inputs: Mapping[str, Floats], clip: int) -> dict[str, Floats]:
        """Return the inputs of one clip: actions and camera path cut to the clip's frames, other inputs unchanged.

        inputs: inputs of the long video.
        """
        start, cut = self.first_frame(clip), dict(inputs)
        if ACTIONS in cut:
            cut[ACTIONS] = cut[ACTIONS][start : start + self.num_frames - 1]
        for name, ndim in ((POSES, 3), (INTRINSICS, 2)):
            if name in cut and cut[name].ndim == ndim:  # intrinsics [4] apply to all frames
                cut[name] = cut[name][start : start + self.num_frames]
        return cut

    def slice_prompt(self, prompt: Prompt, clip: int) -> Prompt:
        return replace(prompt, inputs=self.slice_inputs(prompt.inputs, clip))

    def extend_reader(self, reader: InputReader, num_clips: int) -> InputReader:
        def validate_clips(inputs: Mapping[str, Floats]) -> None:
            for clip in range(num_clips):
                reader.validate(self.slice_inputs(inputs, clip))

        sets = {name: self.extend_reader(part, num_clips) for name, part in reader.sets.items()}
        return replace(reader, num_frames=self.total_frames(num_clips), validate=validate_clips, sets=sets)

    def join(self, clips: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """Join clips to long videos. Overlapping frames are taken from the earlier clip.

        clips: uint8 [videos, frames, height, width, 3] each. A single clip is returned unchanged.
        """
        if len(clips) == 1:
            return clips[0]
        return np.concatenate([clips[0], *(clip[:, self.overlap :] for clip in clips[1:])], axis=1)
