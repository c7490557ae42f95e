"""Compare the memory estimate with the bytes of all live tensors while two ranks train small networks."""

import json

import pytest
import torch

from families import CASES as FAMILIES
from multi_rank.training import ROOT, small_recipe
from ranks import started
from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.distributed.world import World
from wfm_ds.engine.live_bytes import LiveByteCounter, storage_id
from wfm_ds.memory.estimate import estimate_memory
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import cast_persistent_buffers
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.training.diffusion_builder import build_diffusion_engine

TOLERANCE = 0.15
# Small networks in which every part takes a noticeable share of the memory.
WIDER = {
    "sd3": {"num_layers": 4, "num_attention_heads": 24, "caption_projection_dim": 192},
    "wan21": {"num_layers": 4, "num_attention_heads": 8, "ffn_dim": 512},
    "sana": {"num_layers": 16},
    "sana_video": {"num_layers": 4},
    "cosmos25": {"num_layers": 4},
}
BATCH, MICRO_STEPS = 2, 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Own processes: in processes that ran other files, DeepSpeed frees gathered ZeRO-3 weights later."""
    with started(2, tmp_path_factory.mktemp("two_ranks")) as pool:
        yield pool


def own_config(name, folder):
    """Copy a DeepSpeed JSON with buckets reduced in proportion to these small networks."""
    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    config["zero_optimization"] |= {key: 50_000 for key in config["zero_optimization"] if key.endswith("_bucket_size")}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def distillation_sections(world_size):
    """Return recipe sections of DMD2 with MICRO_STEPS micro-steps in each optimizer step."""
    return {
        "data": {"kind": "prompts", "path": "unused"},
        "algorithm": {"name": "dmd2", "teacher": {"guidance_scale": 3.0}},
        "sampling": {"steps": 4, "eval_steps": 4, "guidance_scale": 1.0},
        "rollout": {"prompts_per_step": BATCH * MICRO_STEPS * world_size, "group_size": 1},
        "engine": {"micro_batch_size": BATCH},
    }


def measured_on_rank(folder, family, config, lora, checkpointing, dtype, side, distills=False):
    """Train two steps, and return the counted and estimated bytes of each phase on this rank.

    distills: train DMD2's fake score before each step.
    """
    world = World.join()
    model = registry.load_model(folder, dtype=getattr(torch, dtype), device="cpu", **FAMILIES[family].load_options)
    torch.manual_seed(0)
    denoiser = type(model.unwrapped_denoiser)(**{**model.unwrapped_denoiser.config, **WIDER[family]})
    cast_persistent_buffers(denoiser, model.dtype)  # like load_model
    model.pipeline.transformer = model.unwrapped_denoiser = model.denoiser = denoiser
    model.config = denoiser.config
    supervised = {"engine": {"micro_batch_size": BATCH, "gradient_accumulation": MICRO_STEPS}}
    sections = distillation_sections(world.size) if distills else supervised
    size = {"height": side, "width": side, "num_frames": FAMILIES[family].size[2]}
    sections |= {
        "model": {"dtype": dtype, "gradient_checkpointing": checkpointing},
        "sampling": sections.get("sampling", {}) | size,
        "ema": {"every": 1},
    }
    recipe = small_recipe(config, lora=lora, **sections)
    shape = model.latent_shape(side, side, FAMILIES[family].size[2])
    found = estimate_memory(recipe, model, world.size, device="cpu")
    with LiveByteCounter() as live:
        engine = build_diffusion_engine(
            model, recipe, derive_run_sizes(recipe, world.size), world, engine_policy_copies(recipe)
        )
        peaks = {}
        for adapter in ["fake", "default"] * 2 if distills else ["default"] * 2:
            live.peak = live.current
            with engine.train_adapter(adapter):
                for _ in range(MICRO_STEPS):
                    train(engine, model, shape, BATCH * MICRO_STEPS * world.size)
                peaks["train"], live.peak = live.peak, live.current
                engine.step()
            if adapter == "default":
                engine.update_ema()
            peaks["optimizer"], live.peak = live.peak, live.current
    elsewhere = {storage_id(t): t.untyped_storage().nbytes() for t in (*denoiser.parameters(), *denoiser.buffers())}
    outside = sum(size for key, size in elsewhere.items() if key not in live.counted_storages)
    beside = ("VAE", "other parts", "texts", "rollouts")
    parts = {phase: {k: v for k, v in found.phases[phase].items() if k not in beside} for phase in peaks}
    return {
        "counted": {phase: peak + outside for phase, peak in peaks.items()},
        "estimated": {phase: sum(of_phase.values()) for phase, of_phase in parts.items()},
        "parts": parts,
    }


def train(engine, model, shape, num_terms):
    """Train one micro-step on noise."""
    texts = {
        name: torch.zeros(BATCH, *of_text, dtype=torch.int64 if name.endswith("mask") else torch.float32)
        for name, of_text in model.text_shapes().items()
    }
    latents, sigma = torch.randn(BATCH, *shape), torch.full((BATCH,), 0.5)
    velocity = model.denoise(latents, sigma, texts, 0)
    engine.backward((velocity - latents).square().mean(), num_terms)


def case(family, config, *, lora=False, checkpointing=False, dtype="bfloat16", side=64):
    recomputed = {False: "", True: "-checkpointed", "attention": "-attention-kept"}[checkpointing]
    name = f"{family}-{config}-{'lora' if lora else 'full'}{recomputed}-{dtype}-{side}"
    arguments = (family, config, lora, checkpointing, dtype, side)
    return pytest.param(*arguments, id=name)


@pytest.mark.parametrize(
    ("family", "config", "lora", "checkpointing", "dtype", "side"),
    [
        case("sd3", "zero2"),
        case("sd3", "zero3", lora=True, checkpointing=True),
        case("sd3", "zero1"),
        case("sd3", "zero1", lora=True),
        case("sd3", "zero2", checkpointing=True),
        case("sd3", "zero2", lora=True, dtype="float32"),
        case("sd3", "zero3"),
        case("sd3", "zero3", checkpointing=True, dtype="float32"),
        case("wan21", "zero2", checkpointing=True),
        case("wan21", "zero2", checkpointing="attention", lora=True),
        case("sd3", "zero3", checkpointing="attention"),
        case("wan21", "zero3", lora=True, side=96),  # fewer weights are gathered than the limit allows
        case("sana", "zero2"),
        case("sana", "zero1", lora=True, checkpointing=True),
        case("sana_video", "zero2", lora=True),
        case("cosmos25", "zero2", lora=True, checkpointing=True),
        case("cosmos25", "zero3"),
    ],
)
@pytest.mark.ci_cases(
    "sd3-zero3-lora-checkpointed-bfloat16-64",
    "wan21-zero2-lora-attention-kept-bfloat16-64",
    "sd3-zero2-lora-float32-64",
)
def test_the_estimate_equals_the_bytes_of_the_tensors(
    family, config, lora, checkpointing, dtype, side, two_ranks, tiny_pipelines, tmp_path
):
    words = {"family": family, "lora": lora, "checkpointing": checkpointing, "dtype": dtype, "side": side}
    words |= {"folder": str(tiny_pipelines(family)), "config": str(own_config(config, tmp_path))}
    check_estimate(two_ranks.run(measured_on_rank, **words))


def check_estimate(ranks):
    for rank in ranks:
        for phase, counted in rank["counted"].items():
            assert rank["estimated"][phase] == pytest.approx(counted, rel=TOLERANCE), (phase, rank)


@pytest.mark.parametrize(
    ("family", "config", "checkpointing"),
    [
        ("sd3", "zero2", False),
        ("sd3", "zero1", True),
        ("wan21", "zero2", True),
    ],
)
@pytest.mark.long
def test_the_estimate_of_dmd2_equals_the_bytes_of_the_tensors(
    family, config, checkpointing, two_ranks, tiny_pipelines, tmp_path
):
    words = {"family": family, "lora": True, "checkpointing": checkpointing, "dtype": "bfloat16", "side": 64}
    words |= {"folder": str(tiny_pipelines(family)), "config": str(own_config(config, tmp_path))}
    check_estimate(two_ranks.run(measured_on_rank, distills=True, **words))
