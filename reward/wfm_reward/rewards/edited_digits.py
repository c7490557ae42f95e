"""Rewards of the edit demo: is the named digit inverted, and can a classifier still read it?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import ItemReward, MediaItem, Range, Score
from wfm_reward.rewards.digits import (
    IMAGE_SIZE,
    fit_reward_classifier,
    fit_second_classifier,
    is_digit,
    read_digit,
)

SIDES = ("left", "right")


class EditedDigits(ItemReward):
    """1.0 if the classifier reads the digit `label` in the inverted half `side` of the image, otherwise 0.0.

    `side` and `label` are metadata: `left` or `right`, and the digit in this half of the source. The reward does not
    look at the other half. The classifier, SVC(gamma=.1, C=10), is fitted on the images of scikit-learn's digits with
    odd indices. Models are trained on the images with even indices.
    """

    name = primary_output = "edited_digits"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"edited_digits": Range(0.0, 1.0)}
    required_metadata = ("side", "label")

    def load(self) -> None:
        self._classifier = fit_reward_classifier()

    def score_item(self, item: MediaItem) -> Score:
        side, label, image = item.metadata.get("side"), item.metadata.get("label"), item.frames[0]
        if side not in SIDES:
            return item.fail(f"the metadata `side` is {side!r}, not left or right")
        if not is_digit(label):
            return item.fail(f"the metadata `label` is {label!r}, not a digit from 0 to 9")
        if image.shape[0] < IMAGE_SIZE or image.shape[1] < len(SIDES) * IMAGE_SIZE:
            return item.fail(f"the image is {image.shape[0]} x {image.shape[1]}, too small for two digits")
        half = np.split(255 - image[:, : image.shape[1] // 2 * 2], 2, axis=1)[SIDES.index(side)]
        return item.score(float(read_digit(self._classifier, half) == label))


class SeenEditedDigits(EditedDigits):
    """`edited_digits` with another classifier, for evaluations: 3 nearest neighbours, fitted on the even indices.

    If only `edited_digits` improves during RL, the model is hacking the reward.
    """

    name = primary_output = "seen_edited_digits"
    outputs: ClassVar = {"seen_edited_digits": Range(0.0, 1.0)}

    def load(self) -> None:
        self._classifier = fit_second_classifier()
