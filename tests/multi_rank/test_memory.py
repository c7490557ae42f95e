"""The memory estimate against counted tensors: two ranks train small networks, and all that lives is tracked."""

import json

import pytest
import torch

from families import CASES as FAMILIES
from multi_rank.training import ROOT, small_recipe
from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.distributed.world import World
from wfm_ds.engine.live_bytes import LiveByteCounter, storage_id
from wfm_ds.memory.estimate import estimate_memory
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import cast_persistent_buffers
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.training.diffusion_builder import build_diffusion_engine

TOLERANCE = 0.15
# Small networks in which no part is next to nothing beside the others.
WIDER = {
    "sd3": {"num_layers": 4, "num_attention_heads": 24, "caption_projection_dim": 192},
    "wan21": {"num_layers": 4, "num_attention_heads": 8, "ffn_dim": 512},
    "sana": {"num_layers": 16},
    "sana_video": {"num_layers": 4},
    "cosmos25": {"num_layers": 4},
}
BATCH, MICRO_STEPS = 2, 2


def own_config(name, folder):
    """A copy of a DeepSpeed JSON whose buckets are as small beside these networks as the shipped ones beside others."""
    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    config["zero_optimization"] |= {key: 50_000 for key in config["zero_optimization"] if key.endswith("_bucket_size")}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def measured_on_rank(folder, family, config, lora, checkpointing, dtype, side):
    """Counted and estimated bytes by phase of a rank that trains two steps."""
    world = World.join()
    model = registry.load_model(folder, dtype=getattr(torch, dtype), device="cpu", **FAMILIES[family].load_options)
    torch.manual_seed(0)
    denoiser = type(model.unwrapped_denoiser)(**{**model.unwrapped_denoiser.config, **WIDER[family]})
    cast_persistent_buffers(denoiser, model.dtype)  # as loading does
    model.pipeline.transformer = model.unwrapped_denoiser = model.denoiser = denoiser
    model.config = denoiser.config
    recipe = small_recipe(
        config,
        lora=lora,
        model={"dtype": dtype, "gradient_checkpointing": checkpointing},
        sampling={"height": side, "width": side, "num_frames": FAMILIES[family].size[2]},
        engine={"micro_batch_size": BATCH, "gradient_accumulation": MICRO_STEPS},
        ema={"every": 1},
    )
    shape = model.latent_shape(side, side, FAMILIES[family].size[2])
    found = estimate_memory(recipe, model, world.size, device="cpu")
    with LiveByteCounter() as live:
        engine = build_diffusion_engine(
            model, recipe, derive_run_sizes(recipe, world.size), world, engine_policy_copies(recipe)
        )
        peaks = {}
        for _ in range(2):
            live.peak = live.current
            for _ in range(MICRO_STEPS):
                train(engine, model, shape, BATCH * MICRO_STEPS * world.size)
            peaks["train"], live.peak = live.peak, live.current
            engine.step()
            engine.update_ema()
            peaks["optimizer"], live.peak = live.peak, live.current
    elsewhere = {storage_id(t): t.untyped_storage().nbytes() for t in (*denoiser.parameters(), *denoiser.buffers())}
    outside = sum(size for key, size in elsewhere.items() if not live.is_counted(key))
    beside = ("VAE", "other parts", "texts")
    parts = {phase: {k: v for k, v in found.phases[phase].items() if k not in beside} for phase in peaks}
    return {
        "counted": {phase: peak + outside for phase, peak in peaks.items()},
        "estimated": {phase: sum(of_phase.values()) for phase, of_phase in parts.items()},
        "parts": parts,
    }


def train(engine, model, shape, num_terms):
    """One micro-step on noise."""
    texts = {
        name: torch.zeros(BATCH, *of_text, dtype=torch.int64 if name.endswith("mask") else torch.float32)
        for name, of_text in model.text_shapes().items()
    }
    latents, sigma = torch.randn(BATCH, *shape), torch.full((BATCH,), 0.5)
    velocity = model.denoise(latents, sigma, texts, 0)
    engine.backward((velocity - latents).square().mean(), num_terms)


def case(family, config, *, lora=False, checkpointing=False, dtype="bfloat16", side=64):
    name = f"{family}-{config}-{'lora' if lora else 'full'}{'-checkpointed' * checkpointing}-{dtype}-{side}"
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
        case("wan21", "zero3", lora=True, side=96),  # gathered weights are fewer than may be
        case("sana", "zero2"),
        case("sana", "zero1", lora=True, checkpointing=True),
        case("sana_video", "zero2", lora=True),
        case("cosmos25", "zero2", lora=True, checkpointing=True),
        case("cosmos25", "zero3"),
    ],
)
def test_the_estimate_is_what_tensors_take(
    family, config, lora, checkpointing, dtype, side, two_ranks, tiny_pipelines, tmp_path
):
    path = own_config(config, tmp_path)
    for rank in two_ranks.run(
        measured_on_rank,
        folder=str(tiny_pipelines(family)),
        family=family,
        config=str(path),
        lora=lora,
        checkpointing=checkpointing,
        dtype=dtype,
        side=side,
    ):
        for phase, counted in rank["counted"].items():
            assert rank["estimated"][phase] == pytest.approx(counted, rel=TOLERANCE), (phase, rank)
