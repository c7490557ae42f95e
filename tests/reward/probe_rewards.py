"""Rewards that fail on request, for tests: `probe_rewards:Class` with this folder on PYTHONPATH."""

import json
import os
import signal
import time
from pathlib import Path

from wfm_ds.errors import RewardError
from wfm_reward.base import ItemReward, Range, Reward


class Brightness(Reward):
    """Mean pixel value in [0, 1]. Options: `seconds` per batch, and `journal`, a file that logs the scored batches."""

    name, media_types, primary_output = "brightness", frozenset({"image", "video"}), "brightness"
    outputs = {"brightness": Range(0.0, 1.0)}  # noqa: RUF012

    def __init__(self, device="cpu", *, seconds=0.0, journal=None, **options):
        super().__init__(device, **options)
        self.seconds, self.journal = seconds, journal

    def score(self, batch):
        self.write_down(batch)
        time.sleep(self.seconds)
        return [self.score_item(item) for item in batch]

    def score_item(self, item):
        return item.score(float(item.frames.mean()) / 255, darkest=float(item.frames.min()))

    def write_down(self, batch):
        if self.journal:
            line = {"pid": os.getpid(), "ids": list(batch.sample_ids), "reward": batch.reward, "fps": batch.fps}
            line["at_s"] = time.time()
            with Path(self.journal).open("a") as journal:
                journal.write(json.dumps(line) + "\n")


class Other(Brightness):
    name = "other"


class Few(Brightness):
    name, max_batch = "few", 4


class Patient(Brightness):
    name, stall_s = "patient", 300.0


class Labelled(Brightness):
    name, required_metadata = "labelled", ("label",)


class Moody(Brightness):
    """Behaves as the prompt says, e.g. hangs, dies or raises."""

    name = "moody"

    def score(self, batch):
        self.write_down(batch)
        prompts = set(batch.prompts)
        if "hang" in prompts:
            while True:
                time.sleep(0.01)
        if "die" in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "die once" in prompts and not Path(self.journal).with_suffix(".died").exists():
            Path(self.journal).with_suffix(".died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "short" in prompts:
            return [self.score_item(item) for item in batch][:-1]
        if "none" in prompts:
            return None
        if "swap" in prompts:
            return [self.score_item(item) for item in batch][::-1]
        return [self.score_item(item) for item in batch]

    def score_item(self, item):
        if item.prompt == "raise":
            raise RuntimeError("this picture is unbearable")
        if item.prompt == "nan":
            return item.score(float("nan"))
        if item.prompt == "nan part":
            return item.score(0.5, sharpness=float("nan"))
        if item.prompt == "huge":
            return item.score(7.5)
        if item.prompt == "text":
            return "0.5"
        if item.prompt == "refuse":
            return item.fail("nothing to see")
        return super().score_item(item)


class Failing(Brightness):
    """Fails the k-th sample of each group as `how[k]` says and scores the other samples."""

    name = "failing"

    def __init__(self, device="cpu", *, how, **options):
        super().__init__(device, **options)
        self.how = dict(enumerate(how))

    def failure(self, item):
        return self.how.get(int(item.sample_id.rpartition("/")[2]))

    def score(self, batch):
        self.write_down(batch)
        failures = {self.failure(item) for item in batch}
        while "hang" in failures:
            time.sleep(0.01)
        scores = [self.score_item(item) for item in batch]
        return scores[:-1] if "short" in failures else scores

    def score_item(self, item):
        if self.failure(item) == "raise":
            raise RuntimeError("this picture is unbearable")
        return item.score(float("nan")) if self.failure(item) == "nan" else super().score_item(item)


class CannotLoad(Brightness):
    name = "cannot_load"

    def load(self):
        raise RewardError("the package rapidfoo is missing: pip install rapidfoo")


class DiesLoading(Brightness):
    name = "dies_loading"

    def load(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class InputImages(ItemReward):
    """Returns a checksum of all arrays of an item in `parts`, and the number of input images."""

    name, media_types, primary_output = "input_images", frozenset({"image", "video"}), "count"
    outputs = {"count": Range(0.0, 4.0)}  # noqa: RUF012
    sees_images = True

    def score_item(self, item):
        from reward_samples import checksum

        arrays = {"frames": item.frames, "reference": item.reference, "sound": item.sound, **item.images}
        parts = {name: checksum(array) for name, array in arrays.items() if array is not None}
        return item.score(len(item.images), **parts)


class Sound(InputImages):
    """Returns the sample rate in `parts`, too."""

    name, media_types, needs_sound = "sound", frozenset({"video"}), True

    def score_item(self, item):
        score = super().score_item(item)
        return item.score(score.value, **score.parts, rate=item.sound_rate)
