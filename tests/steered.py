"""A user-defined family conditioned on actions (`model.family: steered:Steered`), and a reward that reads actions.

The velocity is Cosmos-Predict2.5's velocity plus a constant that depends on the actions and their domain.
"""

import json

import numpy as np
import torch

from clips import write_clip
from wfm_ds.models.conditioning_frames import get_clean_frames
from wfm_ds.models.cosmos25 import Cosmos25
from wfm_ds.models.input_specs import InputSpec
from wfm_reward.base import Range, Reward

WIDTH, MOST_DOMAINS = 2, 4


class Steered(Cosmos25):
    family = "steered"
    input_specs = {"actions": InputSpec(rank=2, required=True), "domain": InputSpec(rank=0)}  # noqa: RUF012
    optional_conditioning_keys = frozenset({"actions", "domain"})

    def encode_inputs(self, inputs, num_frames, size):
        actions = torch.from_numpy(np.stack([told["actions"] for told in inputs]))
        domain = torch.tensor([int(told.get("domain", 0)) for told in inputs])
        if actions.shape[1:] != (num_frames - 1, WIDTH) or int(domain.max()) >= MOST_DOMAINS:
            raise ValueError(f"actions {list(actions.shape)} of {num_frames} frames, domain {domain.tolist()}")
        return {"actions": actions.to(self.device), "domain": domain.to(self.device)}

    def denoise(self, latents, sigma, conditioning, expert=None):
        self.check_denoise(latents, sigma, conditioning)
        told = {name: conditioning[name] for name in self.optional_conditioning_keys}
        rest = {name: tensor for name, tensor in conditioning.items() if name not in told}
        height = (told["actions"].sum((1, 2)) + told["domain"]).view(-1, 1, 1, 1, 1)
        given = get_clean_frames(conditioning)
        free = 1 if given is None else 1 - given.mask
        return super().denoise(latents, sigma, rest, expert) + 0.1 * height * free


class Obedience(Reward):
    """Score the mean brightness of the video, scaled by the sum of its actions."""

    name = "obedience"
    media_types = frozenset({"video"})
    outputs = {"obedience": Range(-10.0, 10.0)}  # noqa: RUF012
    primary_output = "obedience"
    required_inputs = ("actions",)

    def score(self, batch):
        return [i.score(i.frames.mean() / 255 * (1 + i.inputs["actions"].sum() / 10)) for i in batch]


def write_world(folder, count=5, frames=9, size=(32, 32)):
    """Write captioned clips and actions [frames-1,2]. Pixels encode the frame index; action row i is (i, clip)."""
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        write_clip(folder / f"{k}.mp4", count=frames, size=size, fps=16)
        actions = np.stack([np.arange(frames - 1), np.full(frames - 1, k)], axis=1).astype(np.float32)
        np.save(folder / f"{k}.actions.npy", actions)
        caption = {"prompt": "a world", "actions": f"{k}.actions.npy", "domain": k % 2, "place": f"clip {k}"}
        (folder / f"{k}.json").write_text(json.dumps(caption))
    return folder
