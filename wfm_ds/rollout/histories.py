"""Histories (rollout.history): clips that the rollout policy generates before the samples of a group.

The last frames of each clip, as uint8, are the conditioning frames of the next clip. The samples continue the last
clip. Only the samples are trained on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wfm_ds.data.buckets import Buckets
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.inputs import InputReader
from wfm_ds.errors import RecipeError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.clips import DecodeFunction, choose_clip_layout, condition_on_last_frames, reconstruct_clip
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout.groups import Group, Images, RolloutSample, first_replica, stack_conditioning_frames
from wfm_ds.rollout.rewards import decode_on_all_ranks, list_reference_rewards
from wfm_ds.sampling.denoise import SamplingPlan
from wfm_ds.types import FIRST_FRAME, Score

if TYPE_CHECKING:
    from wfm_ds.data.action_data import ActionData
    from wfm_ds.runs.job import Job


@dataclass(frozen=True, slots=True)
class HistoryLayout:
    """The clips of a run's groups: up to `max_clips` clips of history, then the clip of the samples."""

    layouts: Mapping[int, ClipLayout]  # {number of conditioning latent frames: layout}
    max_clips: int  # maximum number of clips before the samples
    keeps_recordings: bool  # whether samples are compared with the recordings that they continue

    @property
    def num_frames(self) -> int:
        """Largest number of frames that a group can have."""
        return self.longest.total_frames(self.max_clips + 1)

    @property
    def longest(self) -> ClipLayout:
        """The layout in which clips overlap least, so that a group has the most frames."""
        return max(self.layouts.values(), key=lambda layout: layout.total_frames(self.max_clips + 1))

    def group_layout(self, group: Group) -> ClipLayout:
        """Return the layout for a group. A group without conditioning frames uses the layout for one latent frame."""
        return self.layouts[max(1, group.num_conditioning_frames)]

    def slice_group(self, group: Group, clip: int) -> Group:
        """Return the group with the inputs of clip number `clip` only. The inputs of `group` must cover all clips."""
        return replace(group, prompt=self.group_layout(group).slice_prompt(group.prompt, clip), clip=clip)

    def slice_recording(self, group: Group, frames: Images) -> Images:
        """Return clip 0 and, after a history, the clip after it: [n,F,H,W,3]. frames: recorded frames of all clips."""
        layout = self.group_layout(group)
        starts = [layout.first_frame(clip) for clip in sorted({0, len(group.history_seeds)})]
        return np.stack([frames[start : start + layout.num_frames] for start in starts])

    def check_library(self, actions: ActionData | None) -> None:
        """Raise RecipeError if the trajectories of rollout.trajectory_library are too short."""
        library = None if actions is None else actions.library
        if library is not None and library.shape[1] < self.num_frames - 1:
            raise RecipeError(
                f"rollout.trajectory_library has {library.shape[1]} actions per trajectory, rollout.history.clips "
                f"{self.max_clips} needs {self.num_frames - 1}: use longer trajectories, or fewer clips"
            )


def extend_for_history(
    layout: HistoryLayout | None, buckets: Buckets, inputs: InputReader | None, actions: ActionData | None
) -> tuple[Buckets, InputReader | None]:
    """Return buckets and an input reader that cover all frames of a group. If `layout` is None, return both unchanged.

    Raises RecipeError if the trajectories of rollout.trajectory_library are too short.
    """
    if layout is None:
        return buckets, inputs
    layout.check_library(actions)
    framing, total = buckets.framings[0], layout.num_frames
    framing = replace(framing, num_frames=total, span=None) if layout.keeps_recordings else replace(framing, span=total)
    reader = None if inputs is None else layout.longest.extend_reader(inputs, layout.max_clips + 1)
    return Buckets(framing, buckets.sizes), reader


def choose_history_layout(
    recipe: Recipe, model: DiffusionModel, *, keeps_recordings: bool | None = None
) -> HistoryLayout | None:
    """Return the layout of a run's groups, or None if the run has neither histories nor recordings.

    keeps_recordings: whether groups may have recordings. None: only if a reward of the recipe needs them.
    Raises ModelError if the model cannot continue clips.
    """
    if not recipe.is_rl:
        return None
    max_clips = recipe.rl.rollout.history.clips
    if keeps_recordings is None:
        keeps_recordings = bool(list_reference_rewards(recipe.reward))
    if max_clips == 0 and not keeps_recordings:
        return None
    low, high = recipe.algorithm.conditioning_frame_range
    layouts = {n: choose_clip_layout(model, recipe.sampling, n) for n in range(low, high + 1)}
    return HistoryLayout(layouts, max_clips, keeps_recordings)


@dataclass(frozen=True, slots=True)
class HistoryWalker:
    """Generates the histories of groups with the active weights."""

    sampler: Sampler
    layout: HistoryLayout
    decode: DecodeFunction  # must return the videos on all ranks of a replica

    @torch.no_grad()
    def start_samples(
        self, groups: Mapping[int, Group], plan: SamplingPlan, num_clips: Sequence[int] | None = None
    ) -> dict[int, Group]:
        """Generate the history of each group. Returns groups with the inputs and conditioning frames of their samples.

        groups: {index of a group in the step: group}, at least one.
        num_clips: entry c is the number of clips with index c to generate. If the groups need fewer, the other clips
        are discarded; they only make all ranks run the same forward passes. None: as many as the groups need.
        If the history of a group has non-finite latents, its samples continue the recorded frames instead, as clip 0.
        """
        videos, broken, spare = dict[int, Images](), set[int](), next(iter(groups))
        for clip, count in enumerate(count_clips(groups.values()) if num_clips is None else num_clips):
            going = [g for g, group in groups.items() if len(group.history_seeds) > clip]
            for g in going:  # one by one: a clip must not depend on the other groups of this rank
                videos[g], is_finite = self.generate_clip(groups[g], clip, videos.get(g), plan)
                broken |= set() if is_finite else {g}
            for _ in range(count - len(going)):
                self.generate_clip(replace(groups[spare], history_seeds=(0,) * (clip + 1)), clip, None, plan)
        starts = {
            g: (0, None) if g in broken else (len(group.history_seeds), videos.get(g)) for g, group in groups.items()
        }
        return {g: self.begin_clip(groups[g], clip, video) for g, (clip, video) in starts.items()}

    def generate_clip(self, group: Group, clip: int, video: Images | None, plan: SamplingPlan) -> tuple[Images, bool]:
        """Return a clip [F,H,W,3] that continues `video`, and whether its latents are finite."""
        start = self.begin_clip(group, clip, video)
        latents = self.sampler.generate(
            "rollout",
            [start.prompt],
            [group.history_seeds[clip]],
            plan,
            conditional_frames=stack_conditioning_frames([start]),
            shape=None if start.data is None else start.data.shape,
        ).clean_latents
        (pixels,), (is_finite,) = self.decode(latents)
        return pixels, is_finite

    def begin_clip(self, group: Group, clip: int, video: Images | None) -> Group:
        """Return `group` with the inputs of clip `clip`, conditioned on the last frames of `video` [F,H,W,3] if set."""
        cut = self.layout.slice_group(group, clip)
        if video is None:
            return cut
        layout = self.layout.group_layout(group)
        (prompt,), frames = condition_on_last_frames(self.sampler, [cut.prompt], video[None], layout)
        return replace(cut, prompt=prompt, data=cut.data if frames is None else frames.latents[0])

    def add_reference(self, group: Group) -> Group:
        """Return `group` with its recorded clip, if any, encoded and decoded by the VAE, as `reference`."""
        if group.recording is None:
            return group
        recorded = group.recording[-1 if group.clip else 0]
        # Encoded and decoded, because a reward should not measure the error of the VAE.
        reference = reconstruct_clip(self.sampler, recorded, self.layout.group_layout(group), clip=0)
        return replace(group, reference=reference, recording=None)


def count_clips(groups: Iterable[Group]) -> list[int]:
    """Return how many groups have at least 1, 2, ... clips before their samples."""
    lengths = [len(group.history_seeds) for group in groups]
    return [sum(length > clip for length in lengths) for clip in range(max(lengths, default=0))]


class ReplicaHistories:
    """Generates the histories of rollouts on the training ranks."""

    def __init__(self, job: Job, layout: HistoryLayout) -> None:
        self.job = job
        self.walker = HistoryWalker(job.sampler, layout, lambda latents: decode_on_all_ranks(job, latents))

    def start_samples(self, groups: Sequence[Group], plan: SamplingPlan) -> list[Group]:
        """Generate the histories of an RL step. Returns all groups with the inputs of their samples.

        All ranks must call this, with the rollout policy active. Only the replicas that generate samples of a group get
        its conditioning frames and `reference`. The rest of the result is identical on every rank.
        """
        world, size, share = self.job.world, self.job.recipe.rl.rollout.group_size, self.job.run_sizes.samples_per_rank
        owners = [first_replica(self.job, g) for g in range(len(groups))]
        by_replica = [
            {g: group for g, group in enumerate(groups) if owners[g] == replica} for replica in range(world.dp_size)
        ]
        counts = [count_clips(owned.values()) for owned in by_replica]
        num_clips = [max(count) for count in itertools.zip_longest(*counts, fillvalue=0)]
        first_local = world.dp_rank * share // size
        spare = {first_local: replace(groups[first_local], history_seeds=())}  # for replicas that own no group
        started = self.walker.start_samples(by_replica[world.dp_rank] or spare, plan, num_clips)
        broken = [g for g in by_replica[world.dp_rank] if started[g].clip < len(groups[g].history_seeds)]
        all_broken = {g for part in world.gather_from_leaders(broken) for g in part} if num_clips else set[int]()
        result = []
        for g, group in enumerate(groups):
            clip = 0 if g in all_broken else len(group.history_seeds)
            start = started[g] if owners[g] == world.dp_rank else self.walker.layout.slice_group(group, clip)
            last = ((g + 1) * size - 1) // share
            for target in range(owners[g] + 1, last + 1) if clip else ():
                if world.dp_rank in (owners[g], target):  # all ranks transfer in the same order: no deadlocks
                    frames = world.transfer_tensor(conditioning_tensor(start), owners[g], target)
                    start = replace_conditioning_frames(start, frames)
            result.append(self.walker.add_reference(start))
        return result


def conditioning_tensor(group: Group) -> Tensor:
    """Return the conditioning frames of a group: latents [C,n,h,w], or pixels [H,W,3] as float32 from 0 to 255."""
    pixels = group.prompt.inputs.get(FIRST_FRAME)
    if pixels is not None:
        return torch.from_numpy(pixels)
    assert group.data is not None, "this replica has read the group"
    return group.data[:, : group.num_conditioning_frames]


def replace_conditioning_frames(group: Group, frames: Tensor) -> Group:
    """Return a copy of the group with these conditioning frames, in the format of `conditioning_tensor`."""
    if FIRST_FRAME in group.prompt.inputs:
        inputs = {**group.prompt.inputs, FIRST_FRAME: frames.cpu().numpy()}
        return replace(group, prompt=replace(group.prompt, inputs=inputs))
    assert group.data is not None, "this replica has read the group"
    return replace(group, data=pad_num_frames(frames, group.data.shape[1]))


def history_metrics(
    samples: Sequence[RolloutSample], scores: Sequence[Mapping[str, Score]], names: Sequence[str]
) -> dict[str, float]:
    """Return `rollout/history_broken` and, for each of the rewards `names`, `reward/<name>/after_<k>`.

    The first is the number of groups with a non-finite history, the second the mean score of samples after k clips.
    """
    groups = {sample.group_id: sample.group for sample in samples}.values()
    broken = sum(group.clip < len(group.history_seeds) for group in groups)
    values: dict[str, list[float]] = {}
    for sample, by_reward in zip(samples, scores, strict=True):
        for name in names:
            value = by_reward[name].value if name in by_reward else None
            if value is not None:
                values.setdefault(f"reward/{name}/after_{sample.group.clip}", []).append(value)
    return {"rollout/history_broken": float(broken)} | {
        tag: math.fsum(part) / len(part) for tag, part in sorted(values.items())
    }


def check_references(recipe: Recipe) -> None:
    """Raise RecipeError if a reward compares samples with recordings, but the samples do not continue recordings."""
    names = list_reference_rewards(recipe.reward)
    if not names:
        return
    algorithm, rollout = recipe.rl.algorithm, recipe.rl.rollout
    if rollout.trajectories != "data":
        problem = f"rollout.trajectories {rollout.trajectories} gives samples other trajectories: set it to data"
    elif algorithm.conditioning_frame_range[0] == 0:
        problem = "not all samples start with its frames: set algorithm.min_num_conditional_frames above 0"
    elif recipe.data.cache_latents:
        problem = "data.cache_latents stores only its first frames: set it to false"
    else:
        return
    raise RecipeError(f"reward {' and '.join(names)} compares samples with the recording they continue, but {problem}")


def history_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if samples continue the policy's own clips, but no reward compares them with recordings."""
    if not recipe.is_rl or recipe.rl.rollout.history.clips == 0 or list_reference_rewards(recipe.reward):
        return []
    return [
        f"rollout.history.clips {recipe.rl.rollout.history.clips} without a reward that compares samples with the "
        "recording: the policy's own frames may not allow the recorded actions, and rewards that are relative to these "
        "frames can then drive videos to extremes: add the reward continuation"
    ]
