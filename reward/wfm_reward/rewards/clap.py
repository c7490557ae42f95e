"""CLAP: similarity of the sound of a video and the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, Range, RewardError, Score
from wfm_reward.rewards._sound import SoundReward, is_silent, to_mono
from wfm_reward.rewards._weights import load_pretrained, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class Clap(SoundReward):
    """Cosine similarity of sound and prompt, -1 to 1. Silent videos fail.

    The sound is converted to one channel and the sample rate of CLAP. CLAP hears the first 10 seconds.
    """

    name = primary_output = "clap"
    backbone = "CLAP"
    outputs: ClassVar = {"clap": Range(-1.001, 1.001)}  # rounding can exceed 1

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "laion/clap-htsat-unfused",
        prompt_key: str | None = None,
        **options: Any,
    ) -> None:
        """prompt_key: metadata key of a text that describes only the sound, in place of the prompt."""
        super().__init__(device, model=model, **options)
        self.prompt_key = prompt_key

    def load(self) -> None:
        from transformers import ClapModel, ClapProcessor

        dtype = torch_dtype(self.name, self.dtype)
        self._clap: Any = load_pretrained(
            self.name, "the model", self.model, lambda path: ClapModel.from_pretrained(path, dtype=dtype)
        )
        self._clap.to(self.device).eval().requires_grad_(False)
        processor: Any = load_pretrained(self.name, "the processor", self.model, ClapProcessor.from_pretrained)
        self._extractor, self._tokenizer = processor.feature_extractor, processor.tokenizer

    def score(self, batch: MediaBatch) -> list[Score]:
        items = list(batch)
        texts = [item.prompt if self.prompt_key is None else item.metadata.get(self.prompt_key) for item in items]
        if missing := [item.sample_id for item, text in zip(items, texts, strict=True) if not isinstance(text, str)]:
            raise RewardError(f"{missing[0]} has no text {self.prompt_key!r} in its metadata")
        assert batch.sound_rate is not None, "the worker checks needs_sound"
        sounds = [item.sound for item in items if item.sound is not None]
        sound_vectors = self.embed_sounds(sounds, batch.sound_rate)
        cosines = (sound_vectors * self.embed_texts([str(text) for text in texts])).sum(-1).tolist()
        return [
            item.fail("the video is silent") if is_silent(sound) else item.score(cosine)
            for item, sound, cosine in zip(items, sounds, cosines, strict=True)
        ]

    def embed_sounds(self, sounds: Sequence[npt.NDArray[np.float32]], rate: int) -> Tensor:
        """Return one unit vector per sound [channels, samples], float32 [B, embedding size].

        rate: samples per second.
        """
        import torch

        target = int(self._extractor.sampling_rate)
        longest = int(self._extractor.nb_max_samples)  # of longer sounds, the extractor takes a random part
        mono = [to_mono(sound, rate, target)[:longest] for sound in sounds]
        features = self._extractor(mono, sampling_rate=target, return_tensors="pt")
        with torch.inference_mode():
            pooled = self._clap.audio_model(
                input_features=features["input_features"].to(self._clap.device, self._clap.dtype),
                is_longer=features["is_longer"].to(self._clap.device),
            ).pooler_output
            return torch.nn.functional.normalize(self._clap.audio_projection(pooled).float(), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return one unit vector per text, float32 [B, embedding size]. Long texts are truncated."""
        import torch

        # RoBERTa does not use its first two position embeddings.
        positions = int(self._clap.config.text_config.max_position_embeddings) - 2
        tokens = self._tokenizer(list(texts), padding=True, truncation=True, max_length=positions, return_tensors="pt")
        ids, mask = (tokens[name].to(self._clap.device) for name in ("input_ids", "attention_mask"))
        with torch.inference_mode():
            pooled = self._clap.text_model(ids, attention_mask=mask).pooler_output
            return torch.nn.functional.normalize(self._clap.text_projection(pooled).float(), dim=-1)
