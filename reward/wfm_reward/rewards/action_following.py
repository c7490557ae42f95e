"""Action following: a frozen Cosmos3 model predicts the actions from the frames (inverse dynamics)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, RewardError, Score
from wfm_reward.rewards._weights import load_pretrained, torch_dtype

Actions = npt.NDArray[np.float32]


class ActionFollowing(ItemReward):
    """Mean over all actions of exp(-MSE / temperature), where MSE compares predicted and conditioning actions.

    `temperature` has the unit of squared actions (normalized actions if the run normalizes them). To find the noise
    floor, first score real clips with their recorded actions. The reward also reports `mse`, and `following_moving`,
    which is the mean over only those actions whose norm is above the median norm.
    """

    name = primary_output = "action_following"
    backbone = "Cosmos3"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        "action_following": Range(0.0, 1.0),
        "following_moving": Range(0.0, 1.0),
        "mse": Range(0.0, float("inf")),
    }
    hub_files: ClassVar = {"model": "pipeline"}
    required_inputs = ("actions",)
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
        """model: folder or Hub name of a Cosmos3 pipeline. domain: name of the embodiment (robot type) in diffusers,
        which defines the number of action components. steps, resolution_tier: settings of the inference.

        Raises RewardError unless `temperature` and `steps` are positive.
        """
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

        self._pipeline = load_pretrained(self.name, "the model", self.model, load_pipeline)
        if not self._pipeline.transformer.config.action_gen:
            raise RewardError(f"reward {self.name}: {self.model} cannot predict actions (action_gen is off)")

    def score_item(self, item: MediaItem) -> Score:
        target = item.inputs["actions"]
        if len(target) != len(item.frames) - 1:
            return item.fail(f"{len(target)} actions for {len(item.frames)} frames; need one less than frames")
        predicted = self._predict_actions(item)
        if predicted.shape[1] != target.shape[1]:
            return item.fail(
                f"actions of {self.domain} have {predicted.shape[1]} numbers, but the sample's have {target.shape[1]}"
            )
        return item.score(**following_scores(predicted, target, self.temperature))

    def _predict_actions(self, item: MediaItem) -> Actions:
        """Predict the actions [F-1,D] from the F frames of a video. Deterministic."""
        import torch
        from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

        video = torch.from_numpy(item.frames).permute(0, 3, 1, 2).float() / 255
        condition = CosmosActionCondition(
            mode="inverse_dynamics",
            chunk_size=len(item.frames) - 1,
            domain_name=self.domain,
            resolution_tier=self.resolution_tier,
            video=video,
        )
        with torch.inference_mode():
            output = self._pipeline(
                prompt=item.prompt,
                action=condition,
                num_inference_steps=self.steps,
                guidance_scale=1.0,
                fps=item.fps or 24.0,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
            )
        actions: Actions = output.action[0].float().numpy()
        return actions


def following_scores(predicted: Actions, target: Actions, temperature: float) -> dict[str, float]:
    """Compare predicted and target actions [F-1,D]. Returns {"value", "mse", "following_moving"}.

    The last key is missing if no target action has a norm above the median norm.
    """
    errors = np.square(predicted - target).mean(axis=1)
    scores = np.exp(-errors / temperature)
    sizes = np.linalg.norm(target, axis=1)
    moving = sizes > np.median(sizes)
    parts = {"following_moving": float(scores[moving].mean())} if moving.any() else {}
    return {"value": float(scores.mean()), "mse": float(errors.mean()), **parts}
