"""PE-AV: similarity of the sound and the frames of a video."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, Score
from wfm_reward.rewards._sound import SoundReward, is_silent, to_mono
from wfm_reward.rewards._weights import load_pretrained, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class SoundMatch(SoundReward, ItemReward):
    """Cosine similarity of sound and frames, -1 to 1. Silent videos fail.

    Measures whether the content of the sound fits the frames, such as a bark and a dog. Does not measure whether both
    are synchronized to the frame: PE-AV computes one embedding of the whole sound and one of all frames. The authors
    of PE-AV compare dot products of these embeddings. The cosine is bounded, so that longer embeddings do not raise
    the score.
    """

    name = primary_output = "sound_match"
    backbone = "PE-AV"
    outputs: ClassVar = {"sound_match": Range(-1.001, 1.001)}  # rounding can exceed 1

    def __init__(self, device: str = "cpu", *, model: str = "facebook/pe-av-large", **options: Any) -> None:
        super().__init__(device, model=model, **options)

    def load(self) -> None:
        from transformers import PeAudioFeatureExtractor

        dtype = torch_dtype(self.name, self.dtype)
        self._pe: Any = load_pretrained(self.name, "the model", self.model, lambda path: load_model(path, dtype))
        self._pe.to(self.device).eval().requires_grad_(False)
        self._extractor: Any = load_pretrained(
            self.name, "the feature extractor", self.model, PeAudioFeatureExtractor.from_pretrained
        )
        self._video_settings = load_pretrained(self.name, "the video processor", self.model, read_video_settings)

    def score_item(self, item: MediaItem) -> Score:
        import torch

        assert item.sound is not None, "the worker checks needs_sound"
        assert item.sound_rate is not None
        if is_silent(item.sound):
            return item.fail("the video is silent")
        rate = int(self._extractor.sampling_rate)
        sound = to_mono(item.sound, item.sound_rate, rate)
        samples = self._extractor(sound, sampling_rate=rate, return_tensors="pt")["input_values"]
        pixels = prepare_frames(item.frames, self._video_settings)[None]
        with torch.inference_mode():
            out = self._pe(
                input_values=samples.to(self._pe.device, self._pe.dtype),
                pixel_values_videos=pixels.to(self._pe.device, self._pe.dtype),
            )
            cosine = torch.cosine_similarity(out.audio_embeds.float(), out.video_embeds.float())
        return item.score(float(cosine))


def load_model(path: str, dtype: Any) -> Any:
    """Load PE-AV from a folder or the Hub. Raises ImportError without a suitable timm, ValueError without weights."""
    from transformers import PeAudioVideoConfig, PeAudioVideoModel

    try:
        config = PeAudioVideoConfig.from_pretrained(path)
        vision = config.audio_video_config.video_config.vision_config
        vision.num_labels = getattr(vision, "num_classes", vision.num_labels)  # transformers 5.23 ignores num_classes
        model, report = PeAudioVideoModel.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True)
    except (ImportError, AttributeError) as error:  # AttributeError: timm 1.0.31 has a buffer that transformers ties
        reason = " ".join(str(error).split())[:100]
        raise ImportError(f"timm>=1.0.23,<1.0.31: pip install 'wfm_ds[reward-sound]' ({reason})") from error
    used = ("audio_model.audio_", "video_model.video_")  # without the text encoder and the heads for texts
    if missing := sorted(key for key in report["missing_keys"] if key.startswith(used)):
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    return model


def read_video_settings(path: str) -> dict[str, Any]:
    """Read the settings of PE-AV's video processor from a folder or the Hub.

    The processor itself needs torchvision. Raises OSError without the file, KeyError without a setting.
    """
    from transformers.utils import cached_file

    stored = json.loads(Path(str(cached_file(path, "video_preprocessor_config.json"))).read_text("utf-8"))
    size = stored["size"]
    return {
        "size": (int(size["height"]), int(size["width"])),
        "mean": stored["image_mean"],
        "std": stored["image_std"],
        "num_frames": stored.get("num_frames") if stored.get("do_sample_frames") else None,
    }


def prepare_frames(frames: npt.NDArray[np.uint8], settings: dict[str, Any]) -> Tensor:
    """Return frames [T,H,W,3] as PE-AV's video processor does, float32 [N,3,height,width].

    N is T, or `num_frames` evenly spaced frames, including the first and the last one.
    """
    import torch

    if count := settings["num_frames"]:
        frames = frames[[int(i * (len(frames) - 1) / (count - 1)) for i in range(count)]]
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    pixels = torch.nn.functional.interpolate(pixels, size=settings["size"], mode="bilinear", antialias=True)
    mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("mean", "std"))
    return (pixels.float() / 255 - mean) / std
