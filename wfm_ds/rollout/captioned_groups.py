"""Creates the groups of an RL step from captioned images or videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wfm_ds.data.batch_reader import BatchReader, TrainingSample, read_on_leader
from wfm_ds.data.samples import pack_prompt, unpack_prompt
from wfm_ds.rollout.groups import Group, RewardedGroup
from wfm_ds.rollout.trajectories import CounterfactualTrajectories
from wfm_ds.seeds import derive_seed, draw_uniform
from wfm_ds.types import MEDIA_INPUTS, Prompt

if TYPE_CHECKING:
    from wfm_ds.rollout.histories import HistoryLayout
    from wfm_ds.runs.job import Job


class CaptionedGroups:
    """Group source for captioned images or videos. Each replica reads and encodes only the data of its own samples."""

    def __init__(
        self,
        job: Job,
        reader: BatchReader,
        encode: Callable[[Sequence[TrainingSample]], Tensor] | None,
        num_conditioning_frames: tuple[int, int],
        trajectories: CounterfactualTrajectories,
        layout: HistoryLayout | None,
    ) -> None:
        """encode: function that encodes samples to clean latents [B, ...] float32, for `Group.data`. All ranks call it.

        num_conditioning_frames: smallest and largest number of conditioning frames of a group, in latent frames.
        trajectories: object that replaces the recorded actions and camera paths.
        layout: clips of each group. None: each group has a single clip and no recording.
        """
        self.trajectories, self.layout = trajectories, layout
        self.job, self.reader, self.encode, self.num_conditioning_frames = job, reader, encode, num_conditioning_frames
        self.num_groups, size = job.recipe.rl.rollout.prompts_per_step, job.recipe.rl.rollout.group_size
        first = job.world.dp_rank * job.run_sizes.samples_per_rank
        self.local_groups = range(first // size, (first + job.run_sizes.samples_per_rank - 1) // size + 1)
        self._reader_states: dict[int, dict[str, Any]] = {}  # {step: state before it}; lists corrupt files

    def step_groups(self, step: int) -> list[Group]:
        job = self.job
        self._reader_states.setdefault(step, self.reader.state())
        positions = [(step - 1) * self.num_groups + g for g in self.local_groups]
        with job.timer("data_wait"):
            next_positions = [position + self.num_groups for position in positions]
            samples = read_on_leader(job.world, lambda: self.reader.read_positions(positions, ahead=next_positions))
        with job.timer("encode"):
            # One by one: the last bits of a latent must not depend on the batch.
            local = dict(zip(self.local_groups, samples, strict=True))
            data = {} if self.encode is None else {g: self.encode([s])[0] for g, s in local.items()}
        captions = [[g, pack_prompt(drop_prompt_media(s.prompt))] for g, s in local.items()]
        prompts = {g: unpack_prompt(packed) for part in job.world.gather_from_leaders(captions) for g, packed in part}
        in_order = [prompts[g] for g in range(self.num_groups)]
        prompts = dict(enumerate(self.trajectories.replace_trajectories(in_order, step)))
        for g, s in local.items():  # only the ranks that generate a group need its images and videos
            media = {name: array for name, array in s.prompt.inputs.items() if name in MEDIA_INPUTS}
            prompts[g] = replace(prompts[g], inputs={**prompts[g].inputs, **media})
        seeds = draw_history_seeds(job.recipe.run.seed, step, self.num_groups, job.recipe.rl.rollout.history.clips)
        groups = [
            Group(
                prompt=prompts[g],
                data=data.get(g),
                num_conditioning_frames=self._draw_num_frames(step, g),
                history_seeds=seeds[g],
            )
            for g in range(self.num_groups)
        ]
        if self.layout is not None and self.layout.keeps_recordings:
            for g, sample in local.items():
                if sample.frames is not None:  # on the leader
                    groups[g] = replace(groups[g], recording=self.layout.slice_recording(groups[g], sample.frames))
        return groups

    def _draw_num_frames(self, step: int, group: int) -> int:
        low, high = self.num_conditioning_frames
        return low + derive_seed(self.job.recipe.run.seed, "given_frames", step, group) % (high - low + 1)

    def observe_rewards(self, step: int, group_rewards: Sequence[RewardedGroup]) -> None:
        """Delete the reader states of finished steps."""
        self._reader_states = {later: state for later, state in self._reader_states.items() if later > step}

    def data_metrics(self) -> dict[str, float]:
        return self.reader.bad_counts(self.job.world.sum_over_replicas)

    def state_dict(self) -> dict[str, Any]:
        reader_state = self._reader_states[min(self._reader_states)] if self._reader_states else self.reader.state()
        return {"sources": self.job.world.gather_from_leaders(reader_state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reader.restore_from_ranks(state["sources"], self.job.world.dp_rank, self.job.world.dp_size)


def drop_prompt_media(prompt: Prompt) -> Prompt:
    """Return the prompt without its input images and videos, which are large."""
    inputs = {name: array for name, array in prompt.inputs.items() if name not in MEDIA_INPUTS}
    return replace(prompt, inputs=inputs)


def draw_history_seeds(run_seed: int, step: int, num_groups: int, max_clips: int) -> list[tuple[int, ...]]:
    """Return for each group of an RL step the noise seeds of the clips before its samples.

    The number of clips is 0 to `max_clips`. Each number is equally frequent, up to rounding.
    """
    # Without the offset, rounding would prefer the same numbers in every step.
    offset = draw_uniform(run_seed, "history_offset", step)
    order = sorted(range(num_groups), key=lambda g: derive_seed(run_seed, "history", step, g))
    lengths = {g: min(max_clips, int((i + offset) * (max_clips + 1) / num_groups)) for i, g in enumerate(order)}
    return [
        tuple(derive_seed(run_seed, "history_noise", step, g, clip) for clip in range(lengths[g]))
        for g in range(num_groups)
    ]
