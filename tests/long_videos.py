"""Videos of the brightness demo with several clips, and clips generated one by one to compare with."""

import numpy as np
import torch

from families import make_sampler
from wfm_ds.demos.actions_data import PROMPT, write_files
from wfm_ds.models import registry
from wfm_ds.models.clips import clip_seed
from wfm_ds.types import ConditioningFrames, Prompt
from wfm_reward.brightness_demo import encode_actions, frame_brightness, render_frames

NUM_CLIPS, NUM_VIDEOS = 3, 3
SIZE = {"height": 8, "width": 16, "num_frames": 9, "fps": 8, "steps": 5, "grid": "even", "eval_steps": 3}


def write_long_videos(folder):
    """Write three videos of three clips, and one that is too short. Returns (frames of each, moves of each)."""
    draws = np.random.default_rng(1)
    moves = [draws.integers(-1, 2, 2 * NUM_CLIPS) for _ in range(NUM_VIDEOS)]
    frames = [render_frames(frame_brightness(start, one)) for start, one in zip((-0.2, 0.0, 0.2), moves, strict=True)]
    for number, (video, one) in enumerate(zip(frames, moves, strict=True)):
        write_files(folder, number, video, one)
    write_files(folder, NUM_VIDEOS, frames[0][:17], moves[0][:4])
    return frames, moves


def sample_by_hand(pipeline, video, moves, seed):
    """Generate the clips of one video one by one. Returns the new frames of each clip."""
    model = registry.load_model(pipeline, dtype=torch.float32, device="cpu", guardrail="off", fps=8, inputs=["actions"])
    sampler = make_sampler(model, **SIZE)
    clips, first = [], video[0]
    for clip in range(NUM_CLIPS):
        prompt = Prompt(id="a", text=PROMPT, inputs={"actions": encode_actions(moves[2 * clip : 2 * clip + 2])})
        latents = torch.zeros(1, *sampler.latent_shape)
        latents[:, :, :1] = model.encode_uint8([first])
        frames = ConditioningFrames(latents, torch.ones(1, dtype=torch.int64))
        plan, seeds = sampler.evaluation_plan(), [clip_seed(seed, clip)]
        with torch.no_grad():
            clean = sampler.generate("sample", [prompt], seeds, plan, conditional_frames=frames).clean_latents
        pixels = sampler.decode_to_uint8(clean)[0][0]
        clips.append(pixels[1:])
        first = pixels[-1]
    return clips


def mean_psnr(frames, recorded):
    errors = ((frames.astype(float) - recorded) ** 2).mean((1, 2, 3))
    return (10 * np.log10(255**2 / errors)).mean()


def psnr_by_clip(pipeline, frames, moves, seed=0):
    """Return the PSNR of each video in each clip, [P videos, K clips]."""
    clips = [sample_by_hand(pipeline, video, one, seed) for video, one in zip(frames, moves, strict=True)]
    starts = range(1, 8 * NUM_CLIPS, 8)
    return np.array(
        [
            [mean_psnr(clip, video[start : start + 8]) for start, clip in zip(starts, of_video, strict=True)]
            for video, of_video in zip(frames, clips, strict=True)
        ]
    )
