"""Rewards of the edit demo: is the named digit inverted, and can a classifier still read it?"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, Score
from wfm_reward.rewards.digits import IMAGE_SIZE, average_to_8x8, classifier_input, fit_classifier, is_digit

SIDES = ("left", "right")


class EditedDigits(ItemReward):
    """1.0 if the classifier reads the digit `label` in the inverted half `side` of the image, otherwise 0.0.

    `side` and `label` are metadata: `left` or `right`, and the digit in this half of the source. The reward does not
    look at the other half. The classifier, SVC(gamma=.1, C=10), is fitted on the images of scikit-learn's digits with
    odd indices. Models are trained on the images with even indices.
    """

    name = "edited_digits"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"edited_digits": Range(0.0, 1.0)}
    primary_output = "edited_digits"
    required_metadata = ("side", "label")
    fit_offset: ClassVar[int] = 1  # the classifier is fitted on the images with this index, and every second one after

    def load(self) -> None:
        self._classifier = fit_classifier(self.create_classifier(), self.fit_offset)

    def create_classifier(self) -> Any:
        from sklearn.svm import SVC

        return SVC(gamma=0.1, C=10)

    def score_item(self, item: MediaItem) -> Score:
        side, label, image = item.metadata.get("side"), item.metadata.get("label"), item.frames[0]
        if side not in SIDES:
            return item.fail(f"the metadata `side` is {side!r}, not left or right")
        if not is_digit(label):
            return item.fail(f"the metadata `label` is {label!r}, not a digit from 0 to 9")
        if image.shape[0] < IMAGE_SIZE or image.shape[1] < len(SIDES) * IMAGE_SIZE:
            return item.fail(f"the image is {image.shape[0]} x {image.shape[1]}, too small for two digits")
        return item.score(float(self.read_inverted(image, side) == label))

    def read_inverted(self, image: npt.NDArray[np.uint8], side: str) -> int:
        """Return the digit, 0 to 9, that the classifier reads in the inverted half of an RGB image [H,W,3]."""
        half = np.split(255 - image[:, : image.shape[1] // 2 * 2], 2, axis=1)[SIDES.index(side)]
        return int(self._classifier.predict([classifier_input(average_to_8x8(half))])[0])


class SeenEditedDigits(EditedDigits):
    """`edited_digits` with another classifier, for evaluations: 3 nearest neighbours, fitted on the even indices.

    If only `edited_digits` improves during RL, the model is hacking the reward.
    """

    name = "seen_edited_digits"
    outputs: ClassVar = {"seen_edited_digits": Range(0.0, 1.0)}
    primary_output = "seen_edited_digits"
    fit_offset = 0

    def create_classifier(self) -> Any:
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(3)
