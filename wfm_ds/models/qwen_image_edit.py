"""Qwen-Image-Edit and Qwen-Image-Edit-Plus, which edit images. The text encoder sees the source images too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLProcessor
from transformers.models.auto.image_processing_auto import (
    AutoImageProcessor,
)  # in 5.17, the public name needs torchvision
from transformers.utils import is_torchvision_available

from wfm_ds.models.assets.loading import translate_loading_errors
from wfm_ds.models.base import TextWithImages
from wfm_ds.models.qwen_image import EMBEDS, MASK, QwenImage
from wfm_ds.models.source_images import create_source_specs
from wfm_ds.types import SOURCES, Conditioning

PROCESSOR = "processor"  # the component that tokenizes a text together with images
EDIT_AREA = 1024 * 1024  # pixels of a source image in QwenImageEditPipeline
SUPPORTED_OPTIONS = {"transformer/config.json": {"guidance_embeds": False, "use_additional_t_cond": False}}
TEXT_TOKEN_SIDE = 28  # pixels along each side of an image token of the text encoder


class ImageTextProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """The processor without its video processor, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


# Saved pipelines name the class of transformers.
ImageTextProcessor.__name__, ImageTextProcessor.__module__ = Qwen2VLProcessor.__name__, Qwen2VLProcessor.__module__


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit. The clean tokens of the source follow the noisy tokens."""

    family = "qwen_image_edit"
    pipeline_classes = ("QwenImageEditPipeline",)
    required_components = (*QwenImage.required_components, PROCESSOR)
    input_specs = create_source_specs("source", required=True)
    text_inputs = frozenset({"source"})
    optional_conditioning_keys = frozenset({"source"})
    supported_options = SUPPORTED_OPTIONS

    @classmethod
    def component_overrides(cls, folder: Path) -> dict[str, Any]:
        """Return the processor, which diffusers can load only if torchvision is installed."""
        if is_torchvision_available():
            return {}
        source = folder / PROCESSOR
        with translate_loading_errors(source):
            images = AutoImageProcessor.from_pretrained(source, local_files_only=True, backend="pil")
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        return {PROCESSOR: ImageTextProcessor(images, tokenizer)}

    def text_folders(self) -> list[str]:
        return [*super().text_folders(), PROCESSOR]

    def text_cache_key(self) -> dict[str, Any]:
        # With torchvision, images are resized by another image processor.
        return {**super().text_cache_key(), PROCESSOR: type(self.pipeline.processor.image_processor).__name__}

    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        raise ValueError(f"{self.family} encodes each prompt together with its source images")

    @torch.no_grad()
    def encode_text_with_images(self, text: TextWithImages) -> Conditioning:
        """Return {prompt_embeds: [1, tokens, channels], prompt_embeds_mask: int64 [1, tokens]}.

        As in the pipeline, max_sequence_length does not limit the number of tokens.
        """
        resize = self.pipeline.image_processor.resize
        images = [resize(Image.fromarray(image), *self.text_image_size(*image.shape[:2])) for image in text.images]
        return self.embed_prompts([text.text], image=images)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes for a prompt of max_sequence_length tokens and square source images."""
        side, _ = self.text_image_size(*self.stock_source_size(1, 1))
        length = self.max_sequence_length + len(self.source_names) * round(side / TEXT_TOKEN_SIDE) ** 2
        return {EMBEDS: (length, self.config.joint_attention_dim), MASK: (length,)}

    def stock_source_size(self, height: int, width: int) -> tuple[int, int]:
        width, height, _ = edit.calculate_dimensions(EDIT_AREA, width / height)
        return height, width

    def text_image_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size (height, width) to which the pipeline resizes a source image for the text encoder.

        In QwenImageEditPipeline, the text encoder and the VAE receive the same image.
        """
        return (height, width) if self.source_size == "stock" else self.stock_source_size(height, width)

    def check_denoise(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None
    ) -> None:
        super().check_denoise(latents, sigma, conditioning, expert)
        if "source" not in conditioning:
            raise ValueError(f"{self.family} needs a source image: conditioning must hold source")


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and -2511, with up to three source images.

    With `zero_cond_t` in the transformer's config (2511), the network gives source tokens the time 0.
    """

    family = "qwen_image_edit_plus"
    pipeline_classes = ("QwenImageEditPlusPipeline",)
    input_specs = create_source_specs(*SOURCES, required=True)
    text_inputs = frozenset(SOURCES)
    optional_conditioning_keys = frozenset(SOURCES)

    def stock_source_size(self, height: int, width: int) -> tuple[int, int]:
        width, height = edit_plus.calculate_dimensions(edit_plus.VAE_IMAGE_SIZE, width / height)
        return height, width

    def text_image_size(self, height: int, width: int) -> tuple[int, int]:
        width, height = edit_plus.calculate_dimensions(edit_plus.CONDITION_IMAGE_SIZE, width / height)
        return height, width
