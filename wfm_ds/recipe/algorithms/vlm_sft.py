"""The settings of fine-tuning a vision-language model on conversations; its loop: training/language.py."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from wfm_ds.recipe.algorithms.base import AlgorithmSettings, OtherSections


class VlmSftAlgorithm(AlgorithmSettings):
    """Fine-tuning of a vision-language model (Qwen2.5-VL, Qwen3-VL, Cosmos-Reason) on conversations about images and
    videos: the cross-entropy of the tokens of its answers."""

    name: Literal["vlm_sft"]
    """Selects this algorithm."""
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """The tokens in the loss: those of all answers with the mark that ends each, of the last answer alone, or of the
    whole conversation. Those of images and videos never are."""
    freeze: list[Literal["vision", "merger", "language"]] = Field(default=[])
    """Parts that stay as they are: the vision tower, the layers that merge its patches into tokens, the language model.
    For runs without lora, which freezes all of them."""
    loss_scale: Literal["tokens", "samples"] = "tokens"
    """What counts alike: every token of a step, over all its rows and ranks, or every conversation, however long its
    answers."""

    takes_conversations: ClassVar[bool] = True
    trains_language: ClassVar[bool] = True

    def check(self, recipe: OtherSections) -> None:
        if recipe.lora is not None and self.freeze:
            raise ValueError("algorithm.freeze: with a lora section all of the base is frozen; remove one of them")
        if recipe.lora is not None:
            recipe.lora.require_default("init_from", "dora", "modules_to_save", unless="a diffusion model")
        if len(set(self.freeze)) == 3:
            raise ValueError("algorithm.freeze names all parts, which leaves nothing to train: leave one of them out")
        if recipe.model.attention not in ("auto", "native"):
            raise ValueError(
                f"model.attention: {recipe.model.attention} serves diffusers' layers; vlm_sft knows auto and native"
            )
        recipe.model.require_default(
            *("family", "base_precision", "vae_dtype", "denoiser_init", "max_sequence_length", "prompt_template"),
            *("revision", "fp8_training", "embedded_guidance"),
            unless="a diffusion model",
        )
        if recipe.engine.compile:
            raise ValueError("engine.compile: vlm_sft has rows of another length each time; remove the key")
