"""A DeepSpeed JSON and a recipe are merged into one configuration, or give one error with file, key and fix."""

import contextlib
import itertools
import json

import pytest

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.deepspeed import (
    CONFIG_FOLDERS,
    build_deepspeed_config,
    find_deepspeed_config,
    policy_copies,
    require_idle_expert_support,
)
from wfm_ds.recipe.schema import Recipe

EVERYTHING = frozenset({"old", "ref", "ema"})


def recipe(deepspeed="zero2", lora=False, checkpointing=False, **engine):
    return Recipe(
        run={"output_dir": "unused", "steps": 4},
        model={"path": "unused", "gradient_checkpointing": checkpointing, "dtype": engine.pop("dtype", "float32")},
        data={"kind": "paired", "path": "unused"},
        sampling={"height": 16, "width": 16},
        algorithm={"name": "sft"},
        lora={"rank": 4} if lora else None,
        engine={"deepspeed": str(deepspeed), **engine},
    )


def merged(recipe, policies=frozenset(), world_size=4, ranks_per_node=2):
    settings = {"accumulation": 3, "world_size": world_size, "ranks_per_node": ranks_per_node}
    return build_deepspeed_config(recipe, policies=policies, **settings)


@pytest.fixture
def config_file(tmp_path):
    def write(zero=None, **top):
        path = tmp_path / "mine.json"
        content = top if zero == "absent" else {"zero_optimization": {"stage": 2, **(zero or {})}, **top}
        path.write_text(json.dumps(content))
        return path

    return write


@check_each("name", ["zero1", "zero2", "zero3", "zero3_offload", "zero3_hpz"])
@check_each("dtype", ["bfloat16", "float32"])
def test_shipped_files_merge_and_deepspeed_accepts_them(name, dtype):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = merged(recipe(name, micro_batch_size=5, max_grad_norm=0.25, dtype=dtype))
    assert config["train_micro_batch_size_per_gpu"] == 5
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.25
    is_bfloat16 = dtype == "bfloat16"
    assert ("bf16" in config, config.get("communication_data_type")) == (is_bfloat16, "fp32" if is_bfloat16 else None)
    assert ("data_types" in config) == (is_bfloat16 and name != "zero1")
    zero = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert zero.stage == int(name[4])
    if zero.stage == 3:
        assert zero.memory_efficient_linear is False
        assert zero.param_persistence_threshold == 0


ZERO, FORCE = "zero_optimization", "zero_force_ds_cpu_optimizer"


@check_each(
    ("settings", "options", "key", "value"),
    [
        ("zero2", {"max_grad_norm": 0}, "gradient_clipping", 0),
        ({"stage": 3}, {}, f"{ZERO}.memory_efficient_linear", False),
        ("zero3_hpz", {"policies": EVERYTHING}, f"{ZERO}.zero_hpz_partition_size", 2),  # ranks per node
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, {"top": {FORCE: False}}, FORCE, False),
        ({"stage": 3, "leaf_module": {"names": ["x"]}}, {"checkpointing": True}, f"{ZERO}.leaf_module.names", ["x"]),
    ],
)
def test_settings_that_fit_are_kept(config_file, settings, options, key, value):
    top, policies = options.pop("top", {}), options.pop("policies", frozenset())
    path = settings if isinstance(settings, str) else config_file(settings, **top)
    found = merged(recipe(path, **options), policies=policies)
    for part in key.split("."):
        found = found[part]
    assert found == value


@check_each(
    ("name", "lora", "overlaps"),
    [
        *[("zero1", True, False), ("zero2", True, False), ("zero1", False, True), ("zero2", False, True)],
        *[("zero3", True, True), ("zero3", False, True), ("zero3_offload", True, True), ("zero3_hpz", False, True)],
    ],
)
def test_adapters_do_not_wait_for_the_device_after_each_backward(name, lora, overlaps):
    assert merged(recipe(name, lora=lora))["zero_optimization"]["overlap_comm"] is overlaps


@check_each(("stage", "lora", "overlaps"), itertools.product([1, 2, 3], [True, False], [True, False]))
def test_overlap_comm_of_a_file_is_kept(config_file, stage, lora, overlaps):
    path = config_file({"stage": stage, "overlap_comm": overlaps})
    assert merged(recipe(path, lora=lora))[ZERO]["overlap_comm"] is overlaps


def test_ref_of_a_lora_run_needs_no_copy():
    assert policy_copies(EVERYTHING, lora=True) == {"old", "ema"}
    assert policy_copies(EVERYTHING, lora=False) == EVERYTHING


OFFLOAD, LEAF = {"device": "nvme"}, {"stage": 3, "leaf_module": {"names": ["x"]}}
REFUSED = [
    (None, {"gradient_clipping": 1.0}, "gradient_clipping .set engine.max_grad_norm in the recipe"),
    (None, {"bf16": {}, "optimizer": {}}, "bf16 .set model.dtype.*, optimizer .set optimizer in"),
    (None, {"train_batch_size": 8}, "remove train_batch_size"),
    ("absent", {"zero_optimisation": {"stage": 3}}, "did you mean zero_optimization"),
    (None, {"qqqq": 1}, "qqqq is not supported by wfm_ds; supported keys"),
    ({"stage3_prefetch_bucket": 1}, {}, "did you mean zero_optimization.stage3_prefetch_bucket_size"),
    ("absent", {}, "zero_optimization.stage must be 1, 2 or 3"),
    ({"stage": 0}, {}, "zero_optimization.stage must be 1, 2 or 3"),
    ({"stage": 3, "zero_quantized_weights": True}, {}, "remove zero_optimization.zero_quantized_weights"),
    ({"stage": 3, "mics_shard_size": 2}, {}, "MiCS is not tested"),
    ({"compute_grad_norm": False}, {}, "NaN gradients are detected by the norm"),
    (None, {"checkpoint": {"writer": {"type": "FAST"}}}, "remove checkpoint.*can lose files"),
    (None, {"sequence_parallel_size": 2}, "sequence_parallel_size is not supported by wfm_ds"),
    (None, {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is not supported by wfm_ds"),
    ({"zenflow": {}}, {}, "remove zero_optimization.zenflow: ZenFlow is not tested"),
    ({"stage": 3, "zero_quantized_gradients": True}, {}, "remove .*zero_quantized_gradients"),
    (None, {"compile": {"deepcompile": True}}, "remove compile: DeepCompile is not tested"),
    (None, {"flops_profiler": {"enabled": True}}, "remove flops_profiler"),
    (None, {"comms_logger": {"enabled": True}}, "remove comms_logger: it misses some"),
    (None, {"hybrid_engine": {"enabled": True}}, "remove hybrid_engine"),
    ({"stage": 3, "memory_efficient_linear": True}, {}, "memory_efficient_linear must be false"),
    *(
        ({"stage": 3, part: OFFLOAD}, {FORCE: False}, "nvme does not support weight copies .ema, old, ref.: use cpu")
        for part in ("offload_optimizer", "offload_param")
    ),
    ({"offload_optimizer": {"device": "cpu"}}, {}, "needs zero_force_ds_cpu_optimizer: false"),
    ({"offload_optimizer": {"device": "gpu"}}, {}, "device must be cpu, nvme or none, got 'gpu'"),
    ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, {}, "super_offload"),
    (LEAF, {}, "needs model.gradient_checkpointing: true"),
    *(({"stage": 3, "zero_hpz_partition_size": size}, {}, "must divide the 4 ranks") for size in (3, 0, "all", 2.0)),
]


@check_each("zero, top, message", REFUSED)
def test_ignored_or_wrong_settings_are_refused(config_file, zero, top, message):
    path = config_file(zero, **top)
    with pytest.raises(RecipeError, match=message) as caught:
        merged(recipe(path), policies=EVERYTHING)
    assert str(caught.value).startswith(f"{path}: ")


def test_leaf_modules_are_refused_with_lora(config_file):
    path = config_file(LEAF)
    with pytest.raises(RecipeError, match="leaf_module fails in the backward pass of LoRA"):
        merged(recipe(path, lora=True, checkpointing=True))


@pytest.mark.parametrize("key", ["merge_lora", "cuda_graph"])
def test_settings_that_need_full_weights_are_refused_with_zero3_except_for_workers(key):
    sections = recipe("zero3", lora=True).model_dump() | {
        "data": {"kind": "prompts", "path": "unused"},
        "algorithm": {"name": "diffusion_nft"},
        "reward": {"functions": [{"name": "color"}]},
    }

    def sharded(**rollout):
        return merged(Recipe.model_validate({**sections, "rollout": {key: True, **rollout}}))

    with pytest.raises(RecipeError, match=f"stage 3 shards the weights, but rollout.{key} "):
        sharded()
    assert sharded(mode="async")["zero_optimization"]["stage"] == 3


@check_each(
    ("stage", "section", "keys", "message"),
    [
        ("zero3", "optimizer", {"name": "adamw8bit"}, None),
        ("zero3_offload", "optimizer", {"name": "adamw8bit"}, "offload.json: with offload the moments .* to adamw"),
        ("zero2", "model", {"fp8_training": "torchao"}, None),
        ("zero3", "model", {"fp8_training": "torchao"}, "zero3.json: model.fp8_training keeps .*: use zero1 or zero2"),
    ],
)
def test_low_precision_in_training_is_refused_where_a_stage_takes_its_use(stage, section, keys, message):
    known = recipe(stage)
    changed = known.model_copy(update={section: getattr(known, section).model_copy(update=keys)})
    with contextlib.nullcontext() if message is None else pytest.raises(RecipeError, match=message):
        merged(changed)


@check_each(
    ("name", "message"),
    [
        *(("zero2", None), ("zero3", None), ("zero3_hpz", None)),
        ("zero1", "zero1.json: ZeRO stage 1 cannot train a model with two experts .*: use zero2 or zero3"),
        ("zero3_offload", "zero3_offload.json: offload_optimizer does not support a model with two .*: use zero3"),
    ],
)
def test_settings_that_lose_gradients_of_an_idle_expert_are_refused(name, message):
    with contextlib.nullcontext() if message is None else pytest.raises(RecipeError, match=message):
        require_idle_expert_support(recipe(name))


def test_files_are_found_from_any_folder_and_must_be_json_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_deepspeed_config("zero3").parent in CONFIG_FOLDERS
    path = tmp_path / "bad.json"
    for text, message in (
        ("{", "not a readable JSON file"),
        ('{"aio": ' + "[" * 100_000 + "]" * 100_000 + "}", "not a readable JSON file .*: correct it, or set another"),
        ("[1]", "expected a JSON object, got list"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "duplicate keys stage: remove one of each"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            merged(recipe(path))
    with pytest.raises(RecipeError, match=r"engine.deepspeed: .*absent.json not found"):
        find_deepspeed_config(str(tmp_path / "absent.json"))
    with pytest.raises(RecipeError, match=r"unknown name zero4: set one of .*zero2"):
        find_deepspeed_config("zero4")
