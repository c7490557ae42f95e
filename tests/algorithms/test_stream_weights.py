"""Losses and log-probabilities of latents with two streams (algorithm.stream_weights)."""

from types import SimpleNamespace

import pytest
import torch

from families import load_tiny
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.algorithms.base import choose_stream_weights
from wfm_ds.algorithms.diffusion_nft import nft_loss
from wfm_ds.algorithms.supervised import velocity_errors
from wfm_ds.errors import RecipeError
from wfm_ds.models.ltx2 import AUDIO, VIDEO
from wfm_ds.sampling.latents import StreamWeights, sample_mean
from wfm_ds.types import Transition

SIZES = {VIDEO: 6, AUDIO: 2}
NFT = {"name": "diffusion_nft", "num_levels": 1}
GRPO = {"name": "flow_grpo", "clip_ratio": 1e-2, "min_step_std": 0.0}
SAMPLING = {"steps": 5, "solver": "flow_sde", "num_frames": 5}
GRID = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0], dtype=torch.float64)


def two_streams(**properties):
    model = {"family": "ltx2", "stream_sizes": lambda sampling: SIZES, "clean_frame_range": lambda count: (0, 0)}
    return SimpleNamespace(**model | properties)


def build(keys, model=None, **more):
    recipe = rl_recipe({**keys, **more}, sampling=SAMPLING)
    return build_rl_algorithm(recipe, GRID, model or two_streams())


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_weights_of_streams_give_weighted_means():
    values = draw(3, 8, seed=0)
    video, audio = values[:, :6].mean(1), values[:, 6:].mean(1)
    for setting, want in (
        ("equal", (video + audio) / 2),
        ("elements", values.mean(1)),
        ({"audio": 3.0}, (video + 3 * audio) / 4),
        ({"audio": 0.0}, video),
    ):
        streams = build(NFT, stream_weights=setting).stream_weights
        mask = None if streams is None else streams.element_weights("cpu")
        torch.testing.assert_close(sample_mean(values, mask), want)
    assert build(NFT, two_streams(stream_sizes=lambda sampling: {})).stream_weights is None


def test_supervised_errors_are_weighted_means_over_the_streams():
    velocity, clean, noise = (draw(3, 8, seed=i) for i in range(3))
    square = (velocity.double() - (noise.double() - clean.double())).square()
    for setting, share in (("equal", 0.5), ({"audio": 3.0}, 0.75), ("elements", 0.25)):
        streams = choose_stream_weights(setting, SIZES)
        want = (1 - share) * square[:, :6].mean(1) + share * square[:, 6:].mean(1)
        got = velocity_errors(velocity, clean, noise, stream_weights=streams)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def nft_batch(algorithm):
    rollouts = [make_rollout(i, draw(8, seed=i)) for i in range(2)]
    (terms,) = algorithm.updates(on_one_rank(rollouts), [1.0, -0.5], 1)
    return algorithm.assemble(terms, rollouts, torch.device("cpu"))


def test_nft_adds_the_losses_of_the_streams():
    velocity, old, ref = (draw(2, 8, seed=10 + i) for i in range(3))

    def loss_of(algorithm, rows=slice(None)):
        batch, settings = nft_batch(algorithm), algorithm.settings
        return nft_loss(
            *(x[:, rows] for x in (velocity, old, batch.clean_latents, batch.noise)),
            *(batch.sigma, batch.credit),
            **{"beta": settings.beta, "adv_clip_max": settings.adv_clip_max, "kl_beta": settings.kl_beta},
            ref_velocity=ref[:, rows],
        )

    for setting, shares in (("equal", (0.5, 0.5)), ({"audio": 3.0}, (0.25, 0.75)), ("elements", None)):
        algorithm = build(NFT, stream_weights=setting)
        got, stats = algorithm.loss(velocity, nft_batch(algorithm), {"old": old, "ref": ref})
        if shares is None:
            want, metrics = loss_of(algorithm)
        else:
            (video, metrics), (audio, _) = loss_of(algorithm, slice(0, 6)), loss_of(algorithm, slice(6, 8))
            want = shares[0] * video + shares[1] * audio
        torch.testing.assert_close(got, want)
        assert stats.keys() == metrics.keys()
        assert torch.equal(stats["nft/old_deviation_max"], (velocity - old).square().amax(1))


def test_log_probabilities_weigh_the_streams_and_the_first_ratio_is_1():
    weight = torch.linspace(-1, 1, 8)
    for setting, share in (("equal", 0.5), ({"audio": 3.0}, 0.75), ("elements", 0.25)):
        algorithm = build(GRPO, stream_weights=setting)
        plan = algorithm.plan(1)
        trajectory = plan.denoise(lambda x, sigma: x * weight, draw(2, 8, seed=0), [1, 2])
        rollouts = [
            make_rollout(
                i,
                trajectory.clean_latents[i],
                transitions=[
                    Transition(
                        index=step.index,
                        latents=step.latents[i],
                        next_latents=step.next_latents[i],
                        log_prob=step.log_prob[i],
                    )
                    for step in trajectory.stored_steps
                ],
            )
            for i in range(2)
        ]
        (terms,) = algorithm.updates(on_one_rank(rollouts), [1.0, -1.0], 1)
        batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
        _, stats = algorithm.loss(batch.latents * weight, batch, {})
        assert (stats["policy/ratio_start_abs_dev"] == 0).all()
        mean = batch.coefficients[:, :1] * batch.latents + batch.coefficients[:, 1:2] * batch.latents * weight
        error = (batch.next_latents - mean).square()
        error = (1 - share) * error[:, :6].mean(1) + share * error[:, 6:].mean(1)
        want = batch.coefficients[:, 4] - batch.coefficients[:, 3] * error
        torch.testing.assert_close(batch.rollout_log_prob.double(), want, rtol=1e-5, atol=1e-5)


def test_the_loss_of_the_sound_alone_reaches_layers_of_the_video(tiny_pipelines):
    model = load_tiny(tiny_pipelines("ltx2"), "ltx2")
    shape = model.latent_shape(32, 64, 5)
    streams = StreamWeights(tuple(model.streams(32, 64, 5).num_elements.values()), (0.0, 1.0))
    conditioning = model.encode_text(["a red circle"])
    velocity = model.denoise(draw(1, *shape, seed=1), torch.tensor([0.7]), conditioning)
    sample_mean(velocity.square(), streams.element_weights("cpu")).sum().backward()
    network = model.unwrapped_denoiser
    assert network.transformer_blocks[0].attn1.to_q.weight.grad.abs().max() > 0
    assert network.proj_out.weight.grad.abs().max() == 0


def test_algorithms_and_models_that_do_not_fit_are_refused():
    model, sampling = two_streams(), rl_recipe(NFT).sampling
    other = rl_recipe({"name": "ddrl"}, sampling={"solver": "edm_2ab"}).algorithm
    with pytest.raises(RecipeError, match="algorithm ddrl does not support ltx2 yet, which generates video and audio"):
        other.check_streams(model, sampling)
    single = two_streams(family="wan", stream_sizes=lambda sampling: {})
    other.check_streams(single, sampling)
    with pytest.raises(RecipeError, match=r"algorithm\.stream_weights: wan generates no sound: remove the key"):
        rl_recipe({**NFT, "stream_weights": "elements"}).algorithm.check_streams(single, sampling)
    rl_recipe(NFT).algorithm.check_streams(single, sampling)
