"""Conversion of vision-language configurations: values of the published format, and errors for unsupported ones."""

import json

import pytest

from commands import wfm_command
from each_case import check_each
from migrate.configurations import REASONER_SFT, migrate
from wfm_ds.errors import RecipeError
from wfm_ds.migrate.translation import detect_mode

main = wfm_command("migrate")
DATA, POLICY = "custom.dataset", "train.train_policy"


def migrated(**changes):
    return migrate(REASONER_SFT, **changes)


def test_a_short_configuration_gets_the_defaults_of_cosmos_rl(tmp_path, capsys):
    """The recipe is incomplete: the run length and the annotations (found by another script) must be filled in."""
    (tmp_path / "sft.toml").write_text("""
[train]
train_batch_per_replica = 32
[policy]
model_name_or_path = "Qwen/Qwen2.5-VL-7B-Instruct"
[train.train_policy]
type = "sft"
mini_batch = 4
""")
    assert main([str(tmp_path / "sft.toml")]) == 2
    out, err = capsys.readouterr()
    assert err == "error: the recipe is incomplete; fill in run.steps, data.path\n"
    assert "  # path: FILL IN, the annotations, a .json" in out
    for part in ("max_tokens: 4096", "fps: 1.0", "lr: 1.0e-06", "deepspeed: zero2", "gradient_accumulation: 8"):
        assert part in out


def test_adapters_keep_rank_and_targets():
    lora = {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    migration = migrated(**{"policy.lora": lora})
    names = ("lora.rank", "lora.alpha", "lora.target_modules", "engine.deepspeed")
    assert [migration.values[name] for name in names] == [32, 64, ["q_proj", "v_proj"], "zero2"]
    assert migration.values["lora.dropout"] == 0.0
    every = migrated(**{"policy.lora": {"r": 4, "target_modules": "all-linear"}})
    assert "lora.target_modules" not in every.values
    assert "policy.lora.target_modules" in every.unsupported


def test_empty_values_are_left_out_and_reported():
    migration = migrated(**{f"{DATA}.media_path": "", f"{DATA}.system_prompt": ""})
    assert {"data.media_path", "data.system_prompt"}.isdisjoint(migration.values)
    assert migration.unsupported.keys() >= {f"{DATA}.media_path", f"{DATA}.system_prompt"}


def test_older_names_of_validation_keys_are_converted():
    older = {"validation": None, "train.enable_validation": True, "train.validation_step": 30}
    migration = migrated(**older)
    assert migration.values["validation.every"] == 30
    assert any("train.validation_step is read as validation.freq" in line for line in migration.renamed)


def test_unknown_keys_are_named_in_the_tables_of_the_script_too():
    migration = migrated(**{f"{DATA}.annotaton_path": "x", "custom.vision.fsp": 2, f"{POLICY}.minibatch": 2})
    assert sorted(migration.unknown) == [f"{DATA}.annotaton_path", "custom.vision.fsp", f"{POLICY}.minibatch"]


@check_each(
    ("key", "value", "reason"),
    [
        ("custom.vision.nframes", 8, "data.video.fps"),
        ("custom.vision.resized_height", 540, "data.pixels"),
        ("policy.parallelism.cp_size", 2, "engine.sequence_parallel"),
        ("train.sequence_packing", True, "without padding"),
        ("policy.freeze_pattern", ["visual"], "algorithm.freeze"),
        (f"{POLICY}.dataset.test_size", 1, "a fraction"),
        (f"{POLICY}.temperature", 1.0, "RL of language models"),
        ("rollout.n_generation", 8, "used by DiffusionNFT"),
        ("custom.mine.name", "a", "user scripts"),
    ],
)
def test_keys_without_counterpart_have_a_reason(key, value, reason):
    assert reason in migrated(**{key: value}).unsupported[key]


def test_epochs_of_annotations_on_this_machine_are_counted(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps([{"conversations": []}] * 700))
    here = {f"{DATA}.annotation_path": str(tmp_path / "train.json"), "train.max_num_steps": None}
    # 700 conversations on 8 ranks: 88 each, so 2 batches of 32 in each of 3 epochs.
    assert migrated(**here).values["run.steps"] == 6
    elsewhere = migrated(**here | {f"{DATA}.annotation_path": "/nowhere.json"})
    assert "/nowhere.json cannot be counted" in elsewhere.unsupported["train.epoch"]


def test_rl_of_the_reasoner_and_models_of_text_are_refused():
    base = {"custom.dataset.annotation_path": "x", "policy.model_name_or_path": "nvidia/Cosmos-Reason2-2B"}
    with pytest.raises(RecipeError, match="SFT on LLaVA annotations is supported"):
        detect_mode(base | {f"{POLICY}.type": "grpo"})
    for kind in ("sft", "grpo"):
        with pytest.raises(RecipeError, match="trains no diffusion model"):
            detect_mode({"policy.model_name_or_path": "Qwen/Qwen2.5-3B", f"{POLICY}.type": kind})
