"""Settings of vision-language fine-tuning on conversations."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from wfm_ds.recipe.algorithms.base import AlgorithmSettings, RecipeSections


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
            raise ValueError(
                f"model.attention: {recipe.model.attention} is for diffusers layers: vlm_sft supports auto and native"
            )
        recipe.model.require_defaults(
            *("family", "base_precision", "vae_dtype", "denoiser_init", "max_sequence_length", "prompt_template"),
            *("fp8_training", "embedded_guidance"),
            unless="a diffusion model",
        )
        recipe.engine.require_defaults("fused_norms", unless="a diffusion model")
        if recipe.engine.compile:
            raise ValueError("engine.compile is not for vlm_sft, its sequence lengths vary: remove the key")
