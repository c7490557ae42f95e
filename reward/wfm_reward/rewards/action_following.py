"""Does a video do what it was told? By inverse dynamics: a frozen Cosmos3 reads the actions from the frames."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, RewardError, Score
from wfm_reward.rewards._weights import loaded, torch_dtype

Actions = npt.NDArray[np.float32]


class ActionFollowing(Reward):
    """Mean over transitions of exp(-mean squared error / temperature) of the actions that the model reads.

    `temperature` is in squares of the actions as the run has them, normalised or not (data.actions). What the model
    misreads of true clips is the noise floor of this reward: score some with their own actions first. Parts: `mse`, and
    `following_moving`, the mean over those transitions whose action is larger than the others' median.
    """

    name = "action_following"
    backbone = "Cosmos3"
    media = frozenset({"video"})
    outputs: ClassVar = {
        "action_following": Range(0.0, 1.0),
        "following_moving": Range(0.0, 1.0),
        "mse": Range(0.0, float("inf")),
    }
    primary = "action_following"
    needs_inputs = ("actions",)
    stall_s = 660.0

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "nvidia/Cosmos3-Nano",
        domain: str = "camera_pose",
        temperature: float = 2.0,
        steps: int = 10,
        resolution_tier: int = 256,
        dtype: str = "bfloat16",
    ) -> None:
        """`model`: folder of a Cosmos3 pipeline, best the one that the run began with, or its name on the hub;
        `domain`: the embodiment, by its name in diffusers, which decides the width of its actions; `steps` and
        `resolution_tier` of the inference. Raises RewardError for a temperature or steps that are not above 0."""
        super().__init__(device)
        if not temperature > 0 or steps < 1:
            raise RewardError(f"reward {self.name}: temperature {temperature} and steps {steps} must be above 0")
        self.model, self.domain, self.temperature = model, domain, temperature
        self.steps, self.resolution_tier, self.dtype = steps, resolution_tier, dtype

    def load(self) -> None:
        dtype = torch_dtype(self.name, self.dtype)

        def load_pipeline(address: str) -> Any:
            from diffusers import Cosmos3OmniPipeline

            pipeline = Cosmos3OmniPipeline.from_pretrained(
                address, torch_dtype=dtype, enable_safety_checker=False, use_safetensors=True
            )
            pipeline.set_progress_bar_config(disable=True)
            return pipeline.to(self.device)

        self._pipeline = loaded(self.name, "the model", self.model, load_pipeline)
        if not self._pipeline.transformer.config.action_gen:
            raise RewardError(f"reward {self.name}: {self.model} reads no actions (action_gen is off)")

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        wanted = item.inputs["actions"]
        if len(wanted) != len(item.frames) - 1:
            return item.failed(f"{len(wanted)} actions do not lead through {len(item.frames)} frames")
        seen = self._read(item)
        if seen.shape[1] != wanted.shape[1]:
            return item.failed(
                f"an action of {self.domain} has {seen.shape[1]} numbers, the sample's has {wanted.shape[1]}"
            )
        return item.scored(**following(seen, wanted, self.temperature))

    def _read(self, item: MediaItem) -> Actions:
        """The actions [F-1,D] that the model sees; always the same of the same frames."""
        import torch
        from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

        video = torch.from_numpy(item.frames).permute(0, 3, 1, 2).float() / 255
        asked = CosmosActionCondition(
            mode="inverse_dynamics",
            chunk_size=len(item.frames) - 1,
            domain_name=self.domain,
            resolution_tier=self.resolution_tier,
            video=video,
        )
        with torch.inference_mode():
            made = self._pipeline(
                prompt=item.prompt,
                action=asked,
                num_inference_steps=self.steps,
                guidance_scale=1.0,
                fps=item.fps or 24.0,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
            )
        read: Actions = made.action[0].float().numpy()
        return read


def following(seen: Actions, wanted: Actions, temperature: float) -> dict[str, float]:
    """Return `value` and the parts of actions [F-1,D] that were seen where others were wanted."""
    errors = np.square(seen - wanted).mean(axis=1)
    followed = np.exp(-errors / temperature)
    sizes = np.linalg.norm(wanted, axis=1)
    moving = sizes > np.median(sizes)
    parts = {"following_moving": float(followed[moving].mean())} if moving.any() else {}
    return {"value": float(followed.mean()), "mse": float(errors.mean()), **parts}
