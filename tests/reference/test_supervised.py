"""Full supervised runs compared with plain PyTorch: loss and gradient norm of every step, and the final weights."""

import functools
import json

import av
import numpy as np
import pytest
from PIL import Image

from clips import write_clip
from multi_rank.resuming import tiny_recipe
from reference.comparison import assert_same_run, assert_same_weights
from reference.draws import draw_uniform
from reference.networks import Network, as_overrides
from reference.product import read_export, read_validation, train_and_keep
from reference.supervised import Supervised

COMMON = {
    "run.steps": 4,
    "run.seed": 7,
    "optimizer.lr": 3e-3,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.05,
    "optimizer.warmup_steps": 2,
    "optimizer.schedule": "cosine",
    "optimizer.final_lr_fraction": 0.2,
    "ema": {"decay": 0.3},
    "engine.micro_batch_size": 2,
    "engine.gradient_accumulation": 2,
    "data.caption_dropout": 0.5,
    "sampling.height": 16,
    "sampling.width": 16,
    "sampling.eval_steps": 1,
    "algorithm.stratified": True,
    "algorithm.logit_mean": 0.3,
    "algorithm.logit_std": 0.8,
    "validation.every": 0,
    "validation.at_start": False,
    "validation.num_prompts": 1,
    "logging.num_samples": 1,
    "logging.console": False,
}
LORA = {"lora": {"rank": 4, "alpha": 8}}
SFT = {
    **{"lora": None, "engine.max_grad_norm": 1.1},  # clips some of the steps
    **{"algorithm.name": "sft", "algorithm.loss_weighting": "cosmap"},
}
DPO = LORA | {"algorithm.name": "dpo", "algorithm.beta": 50.0, "engine.max_grad_norm": 2.0}
EXPERTS = LORA | {
    **{"algorithm.name": "sft", "algorithm.loss_weighting": "none", "engine.max_grad_norm": 1.0},
    **{"engine.gradient_accumulation": 3, "engine.micro_batch_size": 1},
}
FRAMES = LORA | {
    **{"algorithm.name": "sft", "algorithm.loss_weighting": "none", "engine.max_grad_norm": 1.0},
    **{"algorithm.min_num_conditional_frames": 0, "algorithm.max_num_conditional_frames": 1, "sampling.num_frames": 5},
}
HOLDOUT = 0.5  # the hash of one image is below it
NUM_IMAGES = 8


def write_images(folder):
    """Write noise images of the training size, so that they are not resized."""
    draw = np.random.default_rng(5)
    (folder / "images").mkdir(parents=True)
    lines = []
    for i in range(NUM_IMAGES):
        level = draw.integers(0, 256, (1, 1, 3)) + draw.integers(-40, 41, (16, 16, 3))
        Image.fromarray(np.clip(level, 0, 255).astype(np.uint8)).save(folder / "images" / f"{i:03}.png")
        (folder / "images" / f"{i:03}.json").write_text(json.dumps({"prompt": f"the digit {i}"}))
        pair = {
            "prompt": f"the digit {i}",
            "chosen": f"images/{i:03}.png",
            "rejected": f"images/{(i + 1) % NUM_IMAGES:03}.png",
        }
        lines.append(json.dumps(pair) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines[:7]))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "data")


def image_samples(network, folder):
    """Return (id, caption, [latents]) of each image."""
    names = [f"{i:03}" for i in range(NUM_IMAGES)]
    return [(name, f"the digit {int(name)}", [encode(network, folder / "images" / f"{name}.png")]) for name in names]


def pair_samples(network, folder):
    """Return (id, caption, [chosen latents, rejected latents]) of each pair, sorted by id."""
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    sides = ("chosen", "rejected")
    samples = [
        (" > ".join(pair[side] for side in sides), pair["prompt"], [encode(network, folder / pair[s]) for s in sides])
        for pair in pairs
    ]
    return sorted(samples, key=lambda sample: sample[0])


def encode(network, file):
    return network.encode_pixels(Image.open(file))


def train_both(name, options, one_rank, pipeline, data, samples, tmp_path):
    """Train the run and its reference. Return the reference, its held-out samples and its metrics."""
    options = COMMON | options
    network = Network(pipeline, options)
    samples = samples(network)
    held_out = [sample for sample in samples if draw_uniform(0, "holdout", sample[0]) <= HOLDOUT]
    train = [sample for sample in samples if sample not in held_out]
    assert held_out
    batch = options["engine.micro_batch_size"] * options["engine.gradient_accumulation"]
    assert options["run.steps"] * batch > 1.5 * len(train)  # more than one epoch
    words = [*as_overrides(options), f"validation.holdout={HOLDOUT}"]
    one_rank.run(train_and_keep, **tiny_recipe(name, tmp_path, pipeline, *words, data=data))
    reference = Supervised(network, train, options)
    return reference, held_out, reference.train()


def assert_same(reference, held_out, expected, tmp_path):
    """Check metrics, trained weights, EMA, export and validation loss against the reference."""
    optimization, network = reference.optimization, reference.network
    assert_same_run(tmp_path, network, optimization, expected, ("train", "ema"))
    ema, start = (network.named_weights(optimization.policies[name]) for name in ("ema", "ref"))
    assert_same_weights(read_export(tmp_path), ema, start, where="export")
    if reference.o["algorithm.name"] == "sft":
        (validated,) = read_validation(tmp_path)
        assert validated["val/loss"] == pytest.approx(reference.validation_loss(held_out), rel=1e-5)


@pytest.mark.unit
def test_sft_is_plain_pytorch(one_rank, tiny_pipelines, images, tmp_path):
    samples = functools.partial(image_samples, folder=images)
    run = train_both("sd3_sft", SFT, one_rank, tiny_pipelines("sd3"), images / "images", samples, tmp_path)
    assert {line["optim/clipped"] for line in run[-1]} == {0.0, 1.0}
    assert_same(*run, tmp_path)


def test_sft_of_two_experts_is_plain_pytorch(one_rank, tiny_pipelines, images, tmp_path):
    samples, pipeline = functools.partial(image_samples, folder=images), tiny_pipelines("wan22")
    run = train_both("wan22_sft_lora", EXPERTS, one_rank, pipeline, images / "images", samples, tmp_path)
    assert_same(*run, tmp_path)


def test_dpo_is_plain_pytorch(one_rank, tiny_pipelines, images, tmp_path):
    samples, pipeline = functools.partial(pair_samples, folder=images), tiny_pipelines("sd3")
    run = train_both("sd3_dpo", DPO, one_rank, pipeline, images / "pairs.jsonl", samples, tmp_path)
    assert_same(*run, tmp_path)


def test_sft_with_conditioning_frames_is_plain_pytorch(one_rank, tiny_pipelines, tmp_path):
    folder, out = write_videos(tmp_path / "videos"), tmp_path / "run"
    samples, pipeline = functools.partial(video_samples, folder=folder), tiny_pipelines("cosmos25")
    run = train_both("cosmos25_sft_lora", FRAMES, one_rank, pipeline, folder, samples, out)
    assert_same(*run, out)


def write_videos(folder):
    """Write videos of the training size and length."""
    draw = np.random.default_rng(6)
    folder.mkdir()
    for i in range(NUM_IMAGES):
        frames = [draw.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(5)]
        write_clip(folder / f"{i:03}.mp4", size=(16, 16), pictures=frames)
        (folder / f"{i:03}.json").write_text(json.dumps({"prompt": f"the digit {i}"}))
    return folder


def video_samples(network, folder):
    samples = []
    for i in range(NUM_IMAGES):
        with av.open(str(folder / f"{i:03}.mp4")) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        samples.append((f"{i:03}", f"the digit {i}", [network.encode_pixels(frames)]))
    return samples
