"""Groups of an RL step: a prompt each, or a captioned medium each, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from wfm_ds.data.order import BatchSource, TrainingSample
from wfm_ds.data.prompts import PromptOrder
from wfm_ds.data.replica import read_once
from wfm_ds.data.samples import pack_prompt, unpack_prompt
from wfm_ds.seeds import derive_seed
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    from wfm_ds.run.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one group share this."""

    prompt: Prompt
    data: Tensor | None = None  # clean latents [C,...] float32 of its medium, where a sample of the group is
    num_conditional_frames: int = 0  # first latent frames of it that the samples are given


class GroupSource(Protocol):
    """Source of the groups of each RL step. All of its methods are collective."""

    def groups(self, step: int) -> list[Group]:
        """Return the groups of RL step `step` of all ranks; equal on every rank except for `data`."""

    def stats(self) -> dict[str, float]:
        """Metrics of the data so far, `data/*`."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON. Which groups come next follows from the step alone."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class PromptGroups:
    """Groups about a prompt and nothing else."""

    def __init__(self, prompts: PromptOrder, num_groups: int) -> None:
        self.prompts, self.num_groups = prompts, num_groups

    def groups(self, step: int) -> list[Group]:
        return [Group(prompt=prompt) for prompt in self.prompts.prompts(step, self.num_groups)]

    def stats(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


class PairGroups:
    """Groups about a captioned medium: group g of RL step s has the one at position (s-1) * groups + g of the data.

    The leader of a replica reads and encodes what its own samples need. All ranks learn every caption: where a file is
    bad, the substitute's.
    """

    def __init__(
        self,
        job: Job,
        source: BatchSource,
        encode: Callable[[Sequence[TrainingSample]], Tensor],
        num_conditional_frames: tuple[int, int] = (0, 0),
    ) -> None:
        """encode: clean latents [B, ...] float32 of samples, collective. num_conditional_frames: the
        smallest and the largest number of latent frames that a group is given."""
        self.job, self.source, self.encode, self.num_conditional_frames = job, source, encode, num_conditional_frames
        self.num_groups, size = job.recipe.rl.rollout.prompts_per_step, job.recipe.rl.rollout.group_size
        first = job.world.dp_rank * job.derived.samples_per_rank
        self.mine = range(first // size, (first + job.derived.samples_per_rank - 1) // size + 1)

    def groups(self, step: int) -> list[Group]:
        job = self.job
        here = [(step - 1) * self.num_groups + g for g in self.mine]
        with job.timer("data_wait"):
            media = read_once(job.world, lambda: self.source.at(here, ahead=[p + self.num_groups for p in here]))
        with job.timer("encode"):
            # One by one: the last bits of a latent must not depend on what else the rank encodes.
            data = {g: self.encode([m])[0] for g, m in zip(self.mine, media, strict=True)}
        captions = [[g, pack_prompt(m.prompt)] for g, m in zip(self.mine, media, strict=True)]
        prompts = {g: unpack_prompt(packed) for part in job.world.replica_gather(captions) for g, packed in part}
        return [
            Group(prompt=prompts[g], data=data.get(g), num_conditional_frames=self._drawn(step, g))
            for g in range(self.num_groups)
        ]

    def _drawn(self, step: int, group: int) -> int:
        low, high = self.num_conditional_frames
        return low + derive_seed(self.job.recipe.run.seed, "given_frames", step, group) % (high - low + 1)

    def stats(self) -> dict[str, float]:
        return self.source.bad_counts(self.job.world.replica_sums)

    def state(self) -> dict[str, Any]:
        return {"sources": self.job.world.replica_gather(self.source.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.source.restore_from_ranks(state["sources"], self.job.world.dp_rank, self.job.world.dp_size)
