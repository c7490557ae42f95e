"""GenEval (arXiv 2310.11513): check the objects that the prompt requires, with an object detector and CLIP."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_ds.user_class import import_class
from wfm_reward.base import ItemReward, MediaItem, Range, RewardError, Score
from wfm_reward.rewards._scene import COLORS, DetectedObject, find_metadata_problem, score_scene
from wfm_reward.rewards._weights import load_pretrained

if TYPE_CHECKING:
    from torch import Tensor

CONFIDENCE = 0.3
COUNTING_CONFIDENCE = 0.9  # minimum confidence of objects for prompts with tag `counting`
MAX_OBJECTS = 16  # maximum number of objects per class
BACKGROUND_GREY = (153, 153, 153)  # replaces an object's background when CLIP classifies its colour
COLOR_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")


class Detector(ABC):
    """Base class of object detectors for the 80 COCO classes."""

    def __init__(self, model: str, device: str) -> None:
        self.model, self.device = model, device

    @abstractmethod
    def load(self) -> None:
        """Load the model. Called once before the first detection. Raises RewardError if it cannot be loaded."""

    @abstractmethod
    def detect_objects(self, image: npt.NDArray[np.uint8]) -> list[DetectedObject]:
        """Return all objects that are detected in an RGB image [H,W,3], with any confidence."""


class Mask2Former(Detector):
    """Mask2Former from transformers, trained on COCO instances. GenEval uses the same model from mmdet."""

    def load(self) -> None:
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

        model = load_pretrained(
            "gen_eval", "the detector", self.model, Mask2FormerForUniversalSegmentation.from_pretrained
        )
        self._processor: Any = load_pretrained(
            "gen_eval", "the detector", self.model, Mask2FormerImageProcessor.from_pretrained
        )
        self._model: Any = model.to(self.device).eval()

    def detect_objects(self, image: npt.NDArray[np.uint8]) -> list[DetectedObject]:
        import torch

        inputs = self._processor(images=[image], return_tensors="pt").to(self.device)
        with torch.inference_mode():
            outputs = self._model(**inputs)
        size = [image.shape[:2]]
        (result,) = self._processor.post_process_instance_segmentation(
            outputs, threshold=CONFIDENCE, target_sizes=size, return_binary_maps=True
        )
        objects = []
        for number, info in enumerate(result["segments_info"]):
            mask = result["segmentation"][number].bool().cpu().numpy()
            rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
            if len(rows):
                box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
                name = self._model.config.id2label[info["label_id"]]
                objects.append(DetectedObject(name, box, float(info["score"]), mask))
        return objects


class GenEval(ItemReward):
    """Mean score over the clauses of a GenEval prompt: at most 1, negative if there are many extra objects.

    A clause about the number of objects or their colours scores 1 - |detected - required| / required. A clause about a
    position scores 0 or 1. The reward also reports two values, each 0 or 1: `gen_eval_score`, GenEval's original test
    (at least the required objects, and no excluded objects), and `gen_eval_strict`, which requires exact counts. The
    metadata have the keys of GenEval's prompt file: `tag`, `include`, and optionally `exclude`.
    """

    name = "gen_eval"
    media_types = frozenset({"image"})
    outputs: ClassVar = {
        "gen_eval_reward": Range(-math.inf, 1.0),
        "gen_eval_score": Range(0.0, 1.0),
        "gen_eval_strict": Range(0.0, 1.0),
    }
    primary_output = "gen_eval_reward"
    hub_files: ClassVar = {"detector_model": "model", "clip": "model"}
    required_metadata = ("tag", "include")

    def __init__(
        self,
        device: str = "cpu",
        *,
        detector: str = "wfm_reward.rewards.geneval:Mask2Former",
        detector_model: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "openai/clip-vit-large-patch14",
        **options: Any,
    ) -> None:
        """detector: `package.module:Class` of a Detector. detector_model, clip: folders or Hub names of the two models.

        Raises RewardError if the detector is invalid.
        """
        super().__init__(device, **options)
        detector_class = import_class(detector, Detector, key="reward gen_eval: detector", error=RewardError)
        self._detector: Detector = detector_class(detector_model, device)
        self.clip = clip

    def load(self) -> None:
        from wfm_reward.rewards._clip import ClipModel

        self._detector.load()
        self._clip = ClipModel(self.name, self.clip, self.clip, self.device, "float32")
        self._color_texts: dict[str, Tensor] = {}

    def score_item(self, item: MediaItem) -> Score:
        problem = find_metadata_problem(item.metadata)
        if problem:
            return item.fail(problem)
        image = item.frames[0]
        min_confidence = COUNTING_CONFIDENCE if item.metadata["tag"] == "counting" else CONFIDENCE
        objects: dict[str, list[DetectedObject]] = defaultdict(list)
        for detected in sorted(self._detector.detect_objects(image), key=lambda obj: -obj.confidence):
            if detected.confidence > min_confidence and len(objects[detected.name]) < MAX_OBJECTS:
                objects[detected.name].append(detected)
        score = score_scene(
            objects,
            item.metadata["include"],
            item.metadata.get("exclude", []),
            lambda name, detected: self._classify_colors(image, name, detected),
        )
        return item.score(score.soft, gen_eval_score=float(score.correct), gen_eval_strict=float(score.strict))

    def _classify_colors(self, image: npt.NDArray[np.uint8], name: str, objects: Sequence[DetectedObject]) -> list[str]:
        if not objects:
            return []
        if name not in self._color_texts:
            self._color_texts[name] = self._embed_color_texts(name)
        embeddings = self._clip.embed_images([_crop_object(image, detected) for detected in objects])
        indices = (embeddings @ self._color_texts[name].T).argmax(dim=-1)
        return [COLORS[index] for index in indices.tolist()]

    def _embed_color_texts(self, name: str) -> Tensor:
        """Return one CLIP text embedding of unit length per colour: [len(COLORS), embedding size]."""
        import torch

        texts = [template.format(color=color, name=name) for color in COLORS for template in COLOR_TEMPLATES]
        embeddings = self._clip.embed_texts(texts).reshape(len(COLORS), len(COLOR_TEMPLATES), -1).mean(dim=1)
        return torch.nn.functional.normalize(embeddings, dim=-1)


def _crop_object(image: npt.NDArray[np.uint8], detected: DetectedObject) -> Any:
    """Crop an object from an image, as a PIL image. If the object has a mask, its background becomes grey."""
    from PIL import Image

    pixels = (
        image
        if detected.mask is None
        else np.where(detected.mask[..., None], image, np.array(BACKGROUND_GREY, np.uint8))
    )
    x0, y0, x1, y1 = (round(v) for v in detected.box)
    height, width, _ = image.shape
    x0, y0 = min(max(x0, 0), width - 1), min(max(y0, 0), height - 1)
    return Image.fromarray(pixels[y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)])
