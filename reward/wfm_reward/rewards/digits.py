"""Reward of the image quickstart: does a held-out classifier recognize the requested digit?"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, Score

IMAGE_SIZE = 8
MAX_GREY = 16  # scikit-learn's digits have grey levels 0 to 16


class DigitsReward(ItemReward):
    """1.0 if the classifier predicts the digit in the metadata `label`, otherwise 0.0.

    The classifier, SVC(gamma=.1, C=10), is fitted on the images of scikit-learn's digits with odd indices. Models are
    trained on the images with even indices. The part `second_judge` is the result of a second classifier (3 nearest
    neighbours), fitted on the even indices. If only the reward improves, the model is hacking the reward. Larger images
    are averaged to 8x8 pixels.
    """

    name = primary_output = "digits"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"digits": Range(0.0, 1.0), "second_judge": Range(0.0, 1.0)}
    required_metadata = ("label",)

    def load(self) -> None:
        self._classifier = fit_reward_classifier()
        self._second_classifier = fit_second_classifier()

    def score_item(self, item: MediaItem) -> Score:
        label = item.metadata.get("label")
        if not is_digit(label):
            return item.fail(f"the metadata `label` is {label!r}, not a digit from 0 to 9")
        image = item.frames[0]
        if min(image.shape[:2]) < IMAGE_SIZE:
            return item.fail(
                f"the image is {image.shape[0]} x {image.shape[1]}, smaller than {IMAGE_SIZE} x {IMAGE_SIZE}"
            )
        second = float(read_digit(self._second_classifier, image) == label)
        return item.score(float(self.read_digit(image) == label), second_judge=second)

    def read_digit(self, image: npt.NDArray[np.uint8]) -> int:
        """Return the digit, 0 to 9, in an RGB image [H,W,3] with H and W >= 8. Call `load` first."""
        return read_digit(self._classifier, image)


def is_digit(label: object) -> bool:
    return isinstance(label, int) and not isinstance(label, bool) and 0 <= label <= 9


def fit_reward_classifier() -> Any:
    """Fit an SVM to the images with odd indices."""
    from sklearn.svm import SVC

    return fit_classifier(SVC(gamma=0.1, C=10), 1)


def fit_second_classifier() -> Any:
    """Fit a classifier by 3 nearest neighbours to the images with even indices."""
    from sklearn.neighbors import KNeighborsClassifier

    return fit_classifier(KNeighborsClassifier(3), 0)


def fit_classifier(classifier: Any, first: int) -> Any:
    """Fit a classifier to the images of scikit-learn's digits with the indices first, first + 2, ... and return it."""
    from sklearn.datasets import load_digits

    data, every_second = load_digits(), slice(first, None, 2)
    inputs = [classifier_input(np.rint(image * 255 / MAX_GREY)) for image in data.images[every_second]]
    return classifier.fit(inputs, data.target[every_second])


def read_digit(classifier: Any, image: npt.NDArray[np.uint8]) -> int:
    """Return the digit, 0 to 9, that a classifier reads in an RGB image [H,W,3] with H and W >= 8."""
    return int(classifier.predict([classifier_input(average_to_8x8(image))])[0])


def classifier_input(grey: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Convert a grey image [8,8] (0 to 255) to classifier inputs float64 [64] (-1 to 1)."""
    return (2.0 * np.asarray(grey, np.float64) / 255.0 - 1.0).reshape(-1)


def average_to_8x8(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Convert an RGB image [H,W,3] to grey and average it to float32 [8,8] (0 to 255)."""
    from PIL import Image

    grey = image.mean(axis=2, dtype=np.float32)
    return np.asarray(Image.fromarray(grey).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX))
