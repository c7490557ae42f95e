"""Converts chunks to JSON rows and named arrays, which trainer and rollout workers exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.data.samples import pack_prompt, unpack_prompt
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.rollout.groups import Group, RolloutSample, replace_nonfinite_values
from wfm_ds.rollout.histories import conditioning_tensor
from wfm_ds.sampling.denoise import SamplingPlan, StoredStep, Trajectory
from wfm_ds.types import MEDIA_INPUTS, Rollout, Transition

NamedArrays = Sequence[tuple[str, npt.NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """Samples of one group that a worker denoises with the sampling plan of RL step `step`."""

    step: int
    samples: Sequence[RolloutSample]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return JSON rows: the task, then one row for each array that is an input of the prompt or the recording."""
        first = self.samples[0]
        data, inputs = first.group.data, first.prompt.inputs
        task = {
            "step": self.step,
            "group": first.group_id,
            "prompt": pack_prompt(replace(first.prompt, inputs={})),
            "members": [[s.sample_id, s.seed, s.noise_seed] for s in self.samples],
            **({} if data is None else {"latent_frames": data.shape[1]}),
            **({"history": list(first.group.history_seeds)} if first.group.history_seeds else {}),
        }
        recording = [] if first.group.recording is None else [{"recording": True}]
        return [task, *({"input": name} for name in inputs), *recording]

    def to_arrays(self) -> list[tuple[str, npt.NDArray[Any]]]:
        """Return [(name, array)]: the conditioning frames, followed by the prompt's input arrays and the recording.

        The conditioning frames are an array [C,n,h,w] of n latent frames, and n may be 0. If the group has no latents,
        this array is empty, with shape [0]. If there are no other arrays either, returns [].
        """
        group, inputs = self.samples[0].group, self.samples[0].prompt.inputs
        if group.data is None and not inputs and group.recording is None:
            return []
        empty = np.zeros(0, np.float32)
        frames = empty if group.data is None else group.data[:, : group.num_conditioning_frames].cpu().numpy()
        recording = [] if group.recording is None else [("recording", group.recording)]
        return [("frames", frames), *inputs.items(), *recording]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], arrays: Sequence[npt.NDArray[Any]] = ()) -> ChunkTask:
        """Undo `to_rows` and `to_arrays`. Raises KeyError, TypeError or ValueError for malformed rows or arrays."""
        row, *input_rows = rows
        if input_rows and len(arrays) != len(rows):
            raise ValueError(f"{len(arrays)} arrays for {len(rows)} rows")
        recording = None
        if input_rows and input_rows[-1].get("recording"):
            input_rows.pop()
            *arrays, recording = arrays
            if recording.ndim != 5 or recording.dtype != np.uint8:
                raise ValueError(f"invalid recording: {list(recording.shape)} {recording.dtype}")
        inputs = {str(input_row["input"]): array for input_row, array in zip(input_rows, arrays[1:], strict=True)}
        for name, array in inputs.items():
            dtype = np.uint8 if name in MEDIA_INPUTS else np.float32
            if array.dtype != dtype:
                raise ValueError(f"input {name} must be {np.dtype(dtype).name}, got {array.dtype}")
        prompt, data = replace(unpack_prompt(row["prompt"]), inputs=inputs), None
        if arrays and "latent_frames" in row:
            frames = arrays[0]
            if frames.ndim != 4 or frames.dtype != np.float32 or not 0 <= frames.shape[1] < row["latent_frames"]:
                raise ValueError(f"invalid conditioning frames: {list(frames.shape)} {frames.dtype}")
            data = pad_num_frames(torch.from_numpy(frames), row["latent_frames"])
        group = Group(
            prompt=prompt,
            data=data,
            num_conditioning_frames=0 if data is None else arrays[0].shape[1],
            history_seeds=tuple(int(seed) for seed in row.get("history", [])),
            recording=recording,
        )
        samples = [
            RolloutSample(sample_id=sample_id, group_id=row["group"], group=group, seed=seed, noise_seed=noise_seed)
            for sample_id, seed, noise_seed in row["members"]
        ]
        return cls(int(row["step"]), samples)


def pack_trajectory(trajectory: Trajectory) -> tuple[dict[str, Any], NamedArrays]:
    """Return (layout, arrays) of a trajectory with n samples. Non-finite values are replaced by 0.

    For w stored denoising steps, p latents and s denoiser inputs per sample, the arrays are:

        clean [n, ...]          final latents; always present
        points [n, p, ...]      latents before and after the stored steps; consecutive steps share a point
        log_prob [n, w]         log-probability of each stored step
        mean [n, w, ...]        mean of each stored step, if the plan keeps means
        states [n, s, ...]      denoiser input latents, if the plan keeps states

    The layout is JSON. `steps` has [step index, point before, point after] for each stored step, and `states` has the
    step index of each state.
    """
    arrays: list[tuple[str, Tensor]] = [("clean", trajectory.clean_latents)]
    points: list[Tensor] = []
    layout: list[list[int]] = []
    for stored in trajectory.stored_steps:
        if not points or points[-1] is not stored.latents:
            points.append(stored.latents)
        points.append(stored.next_latents)
        layout.append([stored.index, len(points) - 2, len(points) - 1])
    if trajectory.stored_steps:
        arrays += [
            ("points", torch.stack(points, 1)),
            ("log_prob", torch.stack([s.log_prob for s in trajectory.stored_steps], 1)),
        ]
        means = [s.mean for s in trajectory.stored_steps if s.mean is not None]
        arrays += [("mean", torch.stack(means, 1))] if means else []
    if trajectory.states:
        arrays.append(("states", torch.stack([trajectory.states[k] for k in sorted(trajectory.states)], 1)))
    steps = {"steps": layout, "states": sorted(trajectory.states)}
    return steps, [(name, replace_nonfinite_values(tensor).float().cpu().numpy()) for name, tensor in arrays]


def pack_history(group: Group) -> NamedArrays:
    """Return the conditioning frames that a worker generated, or [] if the samples continue recorded frames."""
    return [("history", conditioning_tensor(group).cpu().numpy())] if group.clip else []


def unpack_trajectory(layout: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Trajectory:
    """Undo `pack_trajectory`. Raises KeyError, IndexError or ValueError if layout or tensors are malformed."""
    stored = [
        StoredStep(
            index,
            tensors["points"][:, before],
            tensors["points"][:, after],
            tensors["log_prob"][:, w],
            tensors["mean"][:, w] if "mean" in tensors else None,
        )
        for w, (index, before, after) in enumerate(layout["steps"])
    ]
    states = {int(k): tensors["states"][:, i] for i, k in enumerate(layout["states"])}
    return Trajectory(tensors["clean"], stored, states)


def validate_trajectory(trajectory: Trajectory, count: int, plan: SamplingPlan, shape: Sequence[int]) -> None:
    """Raise ValueError unless it has the stored steps of `plan`, in float32, for `count` samples of this shape."""
    steps = sorted(trajectory.states) if plan.keep_states else [s.index for s in trajectory.stored_steps]
    if steps != list(plan.stored_steps) or (trajectory.stored_steps if plan.keep_states else trajectory.states):
        raise ValueError(f"wrong stored steps: expected {list(plan.stored_steps)}, got {steps}")
    if any((s.mean is None) == plan.keep_means for s in trajectory.stored_steps):
        raise ValueError(f"the means of the steps are {'missing' if plan.keep_means else 'unexpected'}")
    latents = [("clean", trajectory.clean_latents), *(("states", state) for state in trajectory.states.values())]
    for stored in trajectory.stored_steps:
        latents += [("latents", stored.latents), ("next_latents", stored.next_latents)]
        latents += [("mean", stored.mean)] if stored.mean is not None else []
    expected = [(name, tensor, (count, *shape)) for name, tensor in latents]
    expected += [("log_prob", stored.log_prob, (count,)) for stored in trajectory.stored_steps]
    for name, tensor, size in expected:
        if tuple(tensor.shape) != size or tensor.dtype != torch.float32:
            raise ValueError(f"{name}: expected {list(size)} float32, got {list(tensor.shape)} {tensor.dtype}")


def validate_history(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Raise KeyError or ValueError if the shape of a worker's conditioning frames differs from the recorded frames."""
    frames, expected = tensors["history"], conditioning_tensor(group)
    if frames.shape != expected.shape or frames.dtype != torch.float32:
        raise ValueError(f"history: expected {list(expected.shape)} float32, got {list(frames.shape)} {frames.dtype}")


def empty_rollout(sample: RolloutSample, plan: SamplingPlan, shape: Sequence[int], device: torch.device) -> Rollout:
    """Return a rollout of zeros with loss weight 0, for a sample that could not be generated."""
    zeros, zero = torch.zeros(tuple(shape), device=device), torch.zeros((), device=device)
    mean = zeros if plan.keep_means else None
    return Rollout(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt=sample.prompt,
        seed=sample.seed,
        noise_seed=sample.noise_seed,
        clean_latents=zeros,
        transitions=[
            Transition(index=k, latents=zeros, next_latents=zeros, log_prob=zero, mean=mean)
            for k in (() if plan.keep_states else plan.stored_steps)
        ],
        states=dict.fromkeys(plan.stored_steps, zeros) if plan.keep_states else {},
        data_latents=sample.group.data,
        num_conditioning_frames=sample.group.num_conditioning_frames,
    )
