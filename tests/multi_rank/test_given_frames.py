"""Whole RL runs of image-to-video models: two ranks against one, resumed against uninterrupted. Validation samples
start with the conditioning frames."""

from unittest import mock

import numpy as np
import pytest
import torch

from clips import write_clip
from multi_rank.resuming import tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_bitwise_equal, assert_same_runs, records
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.models import registry

COMMON = ["optimizer.eps=1e-4", "optimizer.lr=3e-2", "run.steps=3", "logging.console=false", "data.max_bad_fraction=.5"]
CASES = {
    "nft": ("cosmos25_i2v_nft", "cosmos25", []),
    "told": ("wan22_i2v_nft", "wan22_i2v", []),  # conditioned on an image; all frames are noise
    "flow_grpo": ("wan22_ti2v_flow_grpo", "wan22_ti2v", ["algorithm.clip_ratio=0.03"]),
    "ddrl": (
        "cosmos25_ddrl",
        "cosmos25",
        [
            "sampling.num_frames=5",
            "algorithm.max_num_conditional_frames=1",
            "algorithm.data_beta=0",
            "algorithm.kl_beta=.1",
        ],
    ),
}
RUNS = ("nft", "told", "flow_grpo")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Five captioned images of coloured blocks, and a clip. The third file is corrupt."""
    from PIL import Image

    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    blocks = [np.kron(draw.integers(0, 255, (2, 2, 3)), np.ones((16, 16, 1))).astype(np.uint8) for _ in range(6)]
    for i, block in enumerate(blocks[:5]):
        Image.fromarray(block).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("the same words")
    write_clip(folder / "5.mp4", pictures=[blocks[5]] * 3, size=(32, 32), fps=16)
    (folder / "5.txt").write_text("other words")
    (folder / "2.png").write_bytes(b"nothing")
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for i in range(3):
        write_clip(folder / f"{i}.mp4", count=12, size=(32, 32), fps=16)
        (folder / f"{i}.txt").write_text(f"clip number {i}")
    return folder


@pytest.fixture
def train(train_tiny, images):
    """Return a function that trains one of CASES into tmp_path/where."""

    def run(case, where, *overrides, **options):
        name, family, of_case = CASES[case]
        return train_tiny(where, name, *COMMON, *of_case, *overrides, family=family, data=images, **options)

    return run


@pytest.mark.parametrize("case", RUNS)
def test_runs_with_conditioning_frames_train_alike_on_one_rank_and_on_two(case, train):
    one = train(case, "one")
    assert_same_runs(one, train(case, "two", ranks=2))
    steps = [r for r in records(one) if "loss/policy" in r]
    assert steps[0]["optim/grad_norm"] > 0
    assert steps[2]["data/bad/decode"] >= 1
    if case == "flow_grpo":
        assert {step["policy/ratio_start_abs_dev"] for step in steps} == {0.0}  # rollout and training agree bit for bit


def train_and_keep_draws(recipe, overrides, stop_at=None):
    """Train, and also return the prompt id and first latent frame of each validation sample."""
    from wfm_ds.models.sampler import Sampler

    drawn, generate = [], Sampler.generate

    def noted(self, purpose, prompts, *rest, **options):
        made = generate(self, purpose, prompts, *rest, **options)
        if purpose == "validation":
            frames = made.clean_latents[:, :, 0].tolist()
            drawn.extend(zip([prompt.id for prompt in prompts], frames, strict=True))
        return made

    with mock.patch.object(Sampler, "generate", noted):
        ended = train_on_rank(recipe, overrides, stop_at)
    return ended | {"drawn": drawn}


def test_validation_samples_start_with_the_images_and_a_run_resumes(one_rank, tiny_pipelines, images, tmp_path):
    name, family, _ = CASES["nft"]
    whole, parts = (
        tiny_recipe(name, tmp_path / where, tiny_pipelines(family), *COMMON, data=images)
        for where in ("whole", "parts")
    )
    (ended,) = one_rank.run(train_and_keep_draws, **whole)
    (stopped,) = one_rank.run(train_on_rank, **parts, stop_at=1)
    assert (stopped["status"], stopped["step"]) == ("preempted", 1)
    one_rank.run(train_on_rank, **parts)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")

    model = registry.load_model(tiny_pipelines("cosmos25"), dtype=torch.float32, device="cpu", guardrail="off")
    names = [name for name, _ in ended["drawn"]]
    assert names == ["0", "1", "3"] * 2  # the readable images of the first four, at the start and at the end of the run
    for name, first in ended["drawn"]:
        picture = load_media(LocalFile(images / f"{name}.png"), Framing(height=32, width=32), draw_centre)
        assert torch.equal(torch.tensor(first), model.encode_uint8([picture])[0, :, 0])


def test_sft_validation_samples_start_with_held_out_frames(one_rank, tiny_pipelines, clips, tmp_path):
    """Validation cycles through the frame counts: three samples get 2, 1 and 0 conditioning latent frames."""
    overrides = ["algorithm.max_num_conditional_frames=2", f"validation.path={clips}", "sampling.num_frames=9"]
    overrides.append("data.buckets=[[48, 48], [32, 32]]")  # samples are generated at the size of `sampling`
    size = ["sampling.height=32", "sampling.width=32", "logging.num_samples=3", "run.steps=1"]
    recipe = tiny_recipe(
        "cosmos25_sft", tmp_path / "out", tiny_pipelines("cosmos25"), *COMMON, *overrides, *size, data=clips
    )
    (ended,) = one_rank.run(train_and_keep_draws, **recipe)
    model = registry.load_model(tiny_pipelines("cosmos25"), dtype=torch.float32, device="cpu", guardrail="off")
    drawn = dict(ended["drawn"])
    for name, is_given in (("0", True), ("1", True), ("2", False)):
        framing = Framing(height=32, width=32, num_frames=9, clip="centre")
        clean = model.encode_uint8([load_media(LocalFile(clips / f"{name}.mp4"), framing, draw_centre)])[0]
        assert torch.equal(torch.tensor(drawn[name]), clean[:, 0]) == is_given


@pytest.mark.parametrize(("case", "ranks"), [("nft", 1), ("told", 2), ("flow_grpo", 2), ("ddrl", 2)])
@pytest.mark.ci_cases("nft-1")
def test_workers_receive_the_conditioning_frames(case, ranks, train):
    """In Flow-GRPO half of the groups have no frames, and the second rank receives samples from the first."""
    one_by_one = ["engine.max_forward_batch=4", "validation.at_start=false"]  # a worker denoises one group at a time
    colocated = train(case, "colocated", *one_by_one, ranks=ranks)
    workers = ["rollout.mode=async", "rollout.max_staleness=0"]
    assert_bitwise_equal(train(case, "async", *one_by_one, *workers, ranks=ranks), colocated)
