"""The parts of the memory estimate, compared with the tensors of an engine after one step on two ranks."""

import json

import pytest
import torch

from families import CASES
from multi_rank.test_memory import TOLERANCE, WIDER, measured_on_rank, own_config
from multi_rank.training import small_recipe
from ranks import started
from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.distributed.world import World
from wfm_ds.memory.estimate import estimate_memory
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import cast_persistent_buffers
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.training.diffusion_builder import build_diffusion_engine

SIDE = 64


def parts_on_rank(folder, config, lora):
    """Return ({part: bytes in the engine}, {part: estimated bytes})."""
    world = World.join()
    model = registry.load_model(folder, dtype=torch.bfloat16, device="cpu", **CASES["sd3"].load_options)
    torch.manual_seed(0)
    denoiser = type(model.unwrapped_denoiser)(**{**model.unwrapped_denoiser.config, **WIDER["sd3"]})
    cast_persistent_buffers(denoiser, model.dtype)  # as the model loader does
    model.pipeline.transformer = model.unwrapped_denoiser = model.denoiser = denoiser
    model.config = denoiser.config
    recipe = small_recipe(
        config,
        lora=lora,
        model={"dtype": "bfloat16"},
        sampling={"height": SIDE, "width": SIDE},
        engine={"micro_batch_size": 1, "gradient_accumulation": 1},
        ema={"every": 1},
    )
    parts = estimate_memory(recipe, model, world.size, device="cpu").phases["train"]
    sizes = derive_run_sizes(recipe, world.size)
    engine = build_diffusion_engine(model, recipe, sizes, world, engine_policy_copies(recipe))
    shape = model.latent_shape(SIDE, SIDE, 1)
    texts = {name: torch.zeros(1, *of_text) for name, of_text in model.text_shapes().items()}
    velocity = model.denoise(torch.randn(1, *shape), torch.tensor([0.5]), texts, 0)
    engine.backward(velocity.square().mean(), world.size)
    node_copies = [c for p in engine.module.parameters() if (c := getattr(p, "ds_secondary_tensor", None)) is not None]
    counted_copies = num_bytes(node_copies)
    engine.step()
    masters = engine.shards.master_weights()
    moments = [t for state in engine.shards.optimizer_states() for t in state.values() if t.ndim]
    module = engine.module
    weights = [getattr(p, "ds_tensor", p) for p in module.parameters()]
    counted = {
        "weights": num_bytes(weights) + num_bytes(module.buffers()) + counted_copies,
        "policies": sum(num_bytes(copy.flats) for copy in engine.copies.values()),
        "optimizer states": num_bytes(masters) + num_bytes(moments),
        "gradients": num_bytes(masters),  # one float32 value for each trained weight, sharded in the same way
    }
    return {"counted": counted, "estimated": {part: parts[part] for part in counted}}


def num_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        ("zero2", False),
        pytest.param("zero2", True, marks=pytest.mark.slow),
        ("zero3", False),
        ("zero3 hpz", False),
    ],
)
@pytest.mark.unit
def test_each_part_of_the_estimate_is_what_the_engine_has(config, lora, two_ranks, tiny_pipelines, tmp_path):
    path = own_config(config.partition(" ")[0], tmp_path)
    if "hpz" in config:
        share_weights_on_node(path)
    for rank in two_ranks.run(parts_on_rank, folder=str(tiny_pipelines("sd3")), config=str(path), lora=lora):
        assert rank["estimated"] == pytest.approx(rank["counted"], rel=0.03)


def share_weights_on_node(path):
    """Add hpZ to a DeepSpeed JSON: the two ranks keep a second copy of the weights."""
    config = json.loads(path.read_text())
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    path.write_text(json.dumps(config))


@pytest.mark.long
def test_the_estimate_of_full_training_with_zero3_and_with_hpz_is_what_tensors_take(tiny_pipelines, tmp_path):
    path = own_config("zero3", tmp_path)
    words = {"lora": False, "checkpointing": True, "dtype": "bfloat16", "side": SIDE, "family": "sd3"}
    words |= {"folder": str(tiny_pipelines("sd3")), "config": str(path)}
    with started(2, tmp_path) as new_ranks:  # not two_ranks: earlier tests change when ZeRO-3 frees gathered weights
        plain = new_ranks.run(measured_on_rank, **words)
        share_weights_on_node(path)
        shared = new_ranks.run(measured_on_rank, **words)
    for rank, without in zip(shared, plain, strict=True):
        for phase, counted in rank["counted"].items():
            assert without["estimated"][phase] == pytest.approx(without["counted"][phase], rel=TOLERANCE), phase
            assert rank["estimated"][phase] == pytest.approx(counted, rel=TOLERANCE), phase
            added = rank["estimated"][phase] - without["estimated"][phase]  # the weight copy on the node
            assert added == pytest.approx(counted - without["counted"][phase], rel=TOLERANCE), phase
