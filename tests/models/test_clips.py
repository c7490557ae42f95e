"""Videos of several clips: conditioning frames between clips, and clips whose latents are not finite."""

import numpy as np
import pytest
import torch

from families import CASES, create_prompts, load_tiny, make_sampler
from wfm_ds.errors import ModelError
from wfm_ds.models.clips import choose_clip_layout, encode_last_frames, generate_clips, reconstruct_clip

PROMPTS = create_prompts("a", "b")


@pytest.fixture(scope="module")
def sampler(tiny_pipelines):
    model = load_tiny(tiny_pipelines("cosmos25"), "cosmos25")
    return make_sampler(model, CASES["cosmos25"].size, eval_steps=2)


def test_two_conditioning_latent_frames_are_five_frames(sampler):
    """The last five frames of a clip become the first two latent frames of the next one."""
    layout = choose_clip_layout(sampler.model, sampler.settings, 2)
    assert (layout.num_frames, layout.overlap, layout.total_frames(3)) == (9, 5, 17)
    clips = list(generate_clips(sampler, "sample", PROMPTS, [1, 2], sampler.evaluation_plan(), layout, 2))
    latents = encode_last_frames(sampler, clips[0].pixels, layout)
    assert latents.shape == (2, *sampler.latent_shape)
    for video, encoded in zip(clips[0].pixels, latents, strict=True):
        assert torch.equal(sampler.model.encode_uint8([video[-5:]])[0], encoded[:, :2])
        assert not encoded[:, 2:].any()
    rebuilt, _ = sampler.decode_to_uint8(latents[:, :, :2])
    assert np.abs(clips[1].pixels[:, :5].astype(int) - rebuilt).max() <= 1
    long = layout.join([clip.pixels for clip in clips])
    whole = reconstruct_clip(sampler, long[0], layout, 1)
    assert np.array_equal(whole, sampler.decode_to_uint8(sampler.model.encode_uint8([long[0, 4:13]]))[0][0, 5:])


def test_a_clip_that_is_not_finite_spoils_the_later_ones(sampler):
    layout, decoded = choose_clip_layout(sampler.model, sampler.settings), []

    def decode(latents):
        decoded.append(latents)
        if len(decoded) == 2:
            latents = latents.clone()
            latents[1, 0, 0, 0, 0] = float("nan")
        return sampler.decode_to_uint8(latents)

    plan = sampler.evaluation_plan()
    clips = list(generate_clips(sampler, "sample", PROMPTS, [1, 2], plan, layout, 3, decode=decode))
    assert [clip.is_finite for clip in clips] == [[True, True], [True, False], [True, False]]
    assert torch.stack(decoded).isfinite().all()


def test_layouts_that_are_not_possible_are_refused(sampler):
    for num_latents, message in ((0, "does not support 0"), (3, "does not support 3")):
        with pytest.raises(ModelError, match=message):
            choose_clip_layout(sampler.model, sampler.settings, num_latents)
    short = sampler.settings.model_copy(update={"num_frames": 5})
    with pytest.raises(ModelError, match="too short to be continued: 2 latent frames, of which 2"):
        choose_clip_layout(sampler.model, short, 2)
