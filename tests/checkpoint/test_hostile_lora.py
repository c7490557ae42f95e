"""Malicious and damaged LoRA files: each must cause a short, printable, one-line error within seconds."""

import json
import os
import time

import pytest
import torch
from safetensors.torch import save_file

from commands import wfm_command
from wfm_ds.checkpoint.adapter_loading import read_adapter_names
from wfm_ds.errors import ModelError
from wfm_ds.export.lora_settings import check_settings, layer_alpha

convert = wfm_command("convert")
A, B, LAYER = torch.ones(4, 32), torch.ones(32, 4), "transformer_blocks.0.attn.to_k"
GOOD = {f"transformer.{LAYER}.lora_A.weight": A, f"transformer.{LAYER}.lora_B.weight": B}
SETTINGS = {"r": 4, "lora_alpha": 8}
DEEP = "[" * 100_000
BAD_SETTINGS = {
    "r": ["4", 0, -1, 1.5, True, None, 10**400, [4]],
    "lora_alpha": ["8", None, float("nan"), float("inf"), [8], {}, 10**400],
    "alpha_pattern": [[], 3, {"to_k": "x"}, {"to_k": None}, {"(a+)+b": 3}, {"(": 3}, {"a" * 5000: 3}, {".*.*.*a": 3}],
    "rank_pattern": ["to_k", {"to_k": 0}, {"to_k": 4.5}, {"(to_k|x)*y": 4}, {r"(a)\1": 4}, {"a{2,}{3,}": 4}],
    "modules_to_save": ["proj_out", 3, [3], {"a": 1}, [None]],
    "target_modules": [3, [3], {"a": []}],
    "use_rslora": ["yes", 1],
    "base_model_name_or_path": [3, ["/x"]],
}
BAD_TENSORS = {
    "alpha of two values": {f"{LAYER}.alpha": torch.ones(2)},
    "alpha NaN": {f"{LAYER}.alpha": torch.tensor(float("nan"))},
    "number as A": {f"transformer.{LAYER}.lora_A.weight": torch.tensor(1.0)},
    "empty A": {f"transformer.{LAYER}.lora_A.weight": torch.ones(0, 32)},
    "no inputs": {f"transformer.{LAYER}.lora_A.weight": torch.ones(4, 0)},
    "other rank": {f"transformer.{LAYER}.lora_B.weight": torch.ones(32, 3)},
    "B as a convolution": {f"transformer.{LAYER}.lora_B.weight": torch.ones(32, 4, 1, 1)},
    "integers": {f"transformer.{LAYER}.lora_A.weight": torch.ones(4, 32, dtype=torch.int32)},
    "float8": {f"transformer.{LAYER}.lora_A.weight": A.to(torch.float8_e4m3fn)},
    "the same layer twice": {f"{LAYER}.lora_A.weight": A, f"{LAYER}.lora_B.weight": B},
    "escape codes": {"\x1b[2J\x1b]0;title\x07\n.lora_A.weight": A, "\x1b[2J\x1b]0;title\x07\n.lora_B.weight": B},
    "a long name": {f"{'x' * 3_000_000}.lora_A.weight": A},
    "long unknown name": {"y" * 3_000_000: A},
    "one matrix": {"z.lora_A.weight": A},
    "magnitude per input": {f"transformer.{LAYER}.lora_magnitude_vector": torch.ones(7)},
    "dots": {"..lora_A.weight": A, "..lora_B.weight": B},
    "fused rows": {
        "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": torch.ones(3, 32),
        "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.ones(31, 3),
    },
    "text encoder": {"lora_te1_text_model.lora_down.weight": A, "lora_te1_text_model.lora_up.weight": B},
}
BAD_HEADERS = ["", "x", "[]", "3", "null", DEEP, '{"transformer.lora_alpha": 8}', '{"transformer.r": 4, "x": ']


def hostile_files():
    """Yield (description, tensors, text of the header's settings, text of adapter_config.json or None)."""
    header = json.dumps({f"transformer.{name}": value for name, value in SETTINGS.items()})
    for name, tensors in BAD_TENSORS.items():
        yield name, GOOD | tensors, header, None
    for text in BAD_HEADERS:
        yield f"header {text[:20]}", GOOD, text, None
    for name, values in BAD_SETTINGS.items():
        for value in values:
            settings = SETTINGS | {name: value}
            yield (
                f"{name} {value!s:.20} in the header",
                GOOD,
                json.dumps({f"transformer.{n}": v for n, v in settings.items()}),
                None,
            )
            yield f"{name} {value!s:.20} in the config", GOOD, None, json.dumps(settings)
    for text in (DEEP, "[]", "", "\ud800".encode("utf-16", "surrogatepass").decode("latin1")):
        yield f"config {text[:20]}", GOOD, None, text


@pytest.mark.slow
def test_each_malicious_file_is_a_short_one_line_error(tmp_path, tiny_pipelines, capsys):
    failures, base = [], str(tiny_pipelines("sd3"))
    for number, (name, tensors, header, config) in enumerate(hostile_files()):
        folder = tmp_path / str(number)
        folder.mkdir()
        metadata = {"format": "pt"} | ({} if header is None else {"lora_adapter_metadata": header})
        save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors", metadata=metadata)
        if config is not None:
            (folder / "adapter_config.json").write_text(config)
        start = time.process_time()
        options = ([], ["--base", base], ["--base", base, "--merge"])[number % 3]
        try:
            code = convert([str(folder / "model.safetensors"), str(tmp_path / f"out{number}"), *options])
        except Exception as error:  # noqa: BLE001, counted below
            failures.append(f"{name} {options}: {type(error).__name__} {str(error)[:80]}")
            continue
        text = capsys.readouterr().err
        if code != 2 or text.count("\n") != 1 or len(text) > 1500 or not text[:-1].isprintable():
            failures.append(f"{name} {options}: code {code}, {len(text)} characters: {text[:200]!r}")
        if time.process_time() - start > 5:
            failures.append(f"{name}: {time.process_time() - start:.0f} s")
    assert not failures, f"{len(failures)} of {number + 1}:\n" + "\n".join(failures)


def test_pipes_and_devices_are_not_opened(tmp_path, capsys):
    save_file(GOOD, tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "adapter_config.json")
    assert convert([str(tmp_path / "model.safetensors"), str(tmp_path / "out")]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    os.mkfifo(tmp_path / "COMPLETE")
    assert convert([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "COMPLETE cannot be read (is not a regular file)" in capsys.readouterr().err


def test_patterns_select_layers_as_in_peft():
    patterns = {"to_k": 1.0, r"blocks\.\d+\.attn\.(to_q|to_v)": 2.0, "a.b": 3.0}
    settings = check_settings(SETTINGS | {"alpha_pattern": patterns}, "x")
    for module, alpha in (
        ("blocks.0.attn.to_k", 1.0),
        ("to_k", 1.0),
        ("not_to_k", 8.0),
        ("blocks.11.attn.to_v", 2.0),
        ("c.a.b", 3.0),
        ("a.bc", 8.0),
    ):
        assert layer_alpha(settings, module, 4) == alpha
    with pytest.raises(ModelError, match=r"x: alpha_pattern.*\(a\+\)\+b"):
        check_settings(SETTINGS | {"alpha_pattern": {"(a+)+b": 1.0}}, "x")


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_a_regular_expression_that_selects_layers_is_never_matched(key, tmp_path, tiny_pipelines, capsys):
    slow = r"((\w|\.)+)+!"  # would take hours for the first layer name
    settings = SETTINGS | {"target_modules": [LAYER], key: slow}
    if key == "layers_pattern":
        settings["layers_to_transform"] = [0]
    header = json.dumps({f"transformer.{name}": value for name, value in settings.items()})
    save_file(GOOD, tmp_path / "model.safetensors", metadata={"format": "pt", "lora_adapter_metadata": header})
    with pytest.raises(ModelError, match=rf"{key} is a regular expression, .*; convert the LoRA with `wfm convert`"):
        read_adapter_names(tmp_path / "model.safetensors")
    base = str(tiny_pipelines("sd3"))
    assert convert([str(tmp_path / "model.safetensors"), str(tmp_path / "out"), "--base", base]) == 0
    assert read_adapter_names(tmp_path / "out" / "lora" / "model.safetensors") == set(GOOD)
    capsys.readouterr()
