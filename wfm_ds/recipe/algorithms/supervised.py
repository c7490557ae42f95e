"""Settings of the supervised algorithms: SFT, Diffusion-DPO, and fine-tuning of vision-language models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import AlgorithmSettings, ModelProperties, RecipeSections, StreamKeys
from wfm_ds.recipe.sampling import SamplingRecipe


class SupervisedSettings(StreamKeys):
    """Keys of all supervised algorithms of diffusion models: noise levels and conditioning frames."""

    timestep_density: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    """Probability density of the noise level q before the shift, as in SD3. `logit_normal`: a larger `logit_mean` gives
    more noise."""
    logit_mean: float = 0.0
    """With `timestep_density: logit_normal`: mean of logit(q)."""
    logit_std: PositiveFloat = 1.0
    """With `timestep_density: logit_normal`: standard deviation of logit(q)."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """With `timestep_density: mode`: scale of SD3's mode density."""
    flow_shift: PositiveFloat | None = None
    """Shift of the noise level: sigma = shift * q / (1 + (shift - 1) * q). Unset: the shift of the pipeline's
    scheduler."""
    stratified: bool = False
    """True: draw the noise levels of a global batch from equally probable parts of the density. False: draw them
    independently."""
    min_num_conditional_frames: NonNegativeInt = 0
    """Minimum number of conditioning frames, for video models that support them: clean first latent frames without a
    loss. 0: text to video, 1: image to video, 2: video to video. n latent frames are 1 + 4 * (n - 1) pixel frames."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Maximum number of conditioning frames. The number is chosen uniformly at random per sample and epoch."""

    implementation: ClassVar[str]
    """Import path of the algorithm's class, a subclass of Supervised: `package.module:Class`."""
    matches_flow = True
    items_per_sample: ClassVar[int] = 1
    """Images or videos per sample in a forward pass: 2 for preference pairs."""

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        if self.flow_shift is None:
            model.flow_shift(sampling)  # raises if the scheduler has none

    @model_validator(mode="after")
    def _check_unused_keys(self) -> SupervisedSettings:
        if self.timestep_density != "logit_normal":
            self.require_defaults("logit_mean", "logit_std", unless="timestep_density: logit_normal")
        if self.timestep_density != "mode":
            self.require_defaults("mode_scale", unless="timestep_density: mode")
        return self


class SftAlgorithm(SupervisedSettings):
    """Supervised fine-tuning: flow matching on the data."""

    name: Literal["sft"]
    """Selects this algorithm."""
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "edm", "min_snr"] = "none"
    """Weight of the loss at noise level sigma, with d = (1 - sigma)^2 + sigma^2. `none`: 1. `sigma_sqrt`: 1 / sigma^2,
    at most 100. `cosmap`: 2 / (pi * d). `edm`: d. `min_snr`: the smaller of (1 - sigma)^2 and 5 * sigma^2."""

    implementation = "wfm_ds.algorithms.sft:Sft"
    takes_media = True


class DpoAlgorithm(SupervisedSettings):
    """Diffusion-DPO (arXiv 2311.12908) for flow matching (arXiv 2501.13918): learns from preference pairs, without
    rewards or rollouts."""

    name: Literal["dpo"]
    """Selects this algorithm."""
    beta: PositiveFloat = 2000.0
    """Strength of the regularization towards the reference policy. The implicit reward of a sample is beta / 2 * (l_ref
    - l), where l and l_ref are the mean squared velocity errors of the trained and of the reference policy."""

    implementation = "wfm_ds.algorithms.dpo:Dpo"
    takes_pairs = True
    items_per_sample = 2
    reference_policies = ("ref",)


class VlmSftAlgorithm(AlgorithmSettings):
    """Fine-tuning of a vision-language model (Qwen2.5-VL, Qwen3-VL, Cosmos-Reason) on conversations about images and
    videos, with the cross-entropy of the answer tokens."""

    name: Literal["vlm_sft"]
    """Selects this algorithm."""
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """Tokens in the loss. `answers`: all answers with their end tokens. `last_answer`: only the last answer. `all`: the
    whole conversation. Image and video tokens are always excluded."""
    freeze: list[Literal["vision", "merger", "language"]] = Field(default=[])
    """Model components to freeze: the vision tower (`vision`), the patch merger (`merger`), the language model
    (`language`). Not with `lora`, which freezes all of them."""
    loss_scale: Literal["tokens", "samples"] = "tokens"
    """How the loss of a step is averaged over all sequences and ranks. `tokens`: all tokens have equal weight.
    `samples`: all conversations have equal weight."""

    takes_conversations: ClassVar[bool] = True
    trains_language: ClassVar[bool] = True

    def check_recipe(self, recipe: RecipeSections) -> None:
        if recipe.lora is not None and self.freeze:
            raise ValueError("algorithm.freeze: a lora section already freezes the whole base: remove one of them")
        if recipe.lora is not None:
            recipe.lora.require_defaults("init_from", "dora", "modules_to_save", unless="a diffusion model")
        if len(set(self.freeze)) == 3:
            raise ValueError("algorithm.freeze lists all parts, so nothing would train: remove one of them")
        if recipe.model.attention not in ("auto", "native"):
            raise ValueError(f"model.attention {recipe.model.attention}: vlm_sft supports auto and native")
        recipe.model.require_defaults(
            *("family", "base_precision", "vae_dtype", "denoiser_init", "max_sequence_length", "prompt_template"),
            *("fp8_training", "embedded_guidance"),
            unless="a diffusion model",
        )
        recipe.engine.require_defaults("fused_norms", unless="a diffusion model")
        if recipe.engine.compile:
            raise ValueError("engine.compile is not for vlm_sft, its sequence lengths vary: remove the key")
