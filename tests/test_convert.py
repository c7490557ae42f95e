"""`wfm_ds.cli.convert` on handmade checkpoints. tests/multi_rank/test_convert.py converts those of real runs."""

import json
import logging
import shutil
import time

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from commands import wfm_command
from folders import contents
from wfm_ds.checkpoint.sharded_states import rank_file_name
from wfm_ds.checkpoint.store import COMPLETE
from wfm_ds.cli import conversion
from wfm_ds.distributed import progress
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import adapter_settings, export_weights
from wfm_ds.models import registry

RANK, ALPHA = 4, 10.0


class Weights:
    """A source of an export, made of tensors by name."""

    def __init__(self, tensors, config=None):
        self.tensors, self.config, self.uses_lora = tensors, config, config is not None

    def lora_config(self):
        return self.config

    def iter_full_tensors(self, policy):
        yield from self.tensors.items()


def write_checkpoint(folder, target, states, *, dtype="float32", lora=None, step=7):
    """Write a checkpoint as saved by two ranks. Each state is one flat tensor; rank 0 has its first 60 %.

    `states` maps a policy to its parameters by name.
    """
    folder.mkdir(parents=True)
    rows = {policy: torch.cat([t.float().flatten() for t in of.values()]) for policy, of in states.items()}
    total = len(rows["train"])
    bounds = [0, int(0.6 * total), total]
    for rank in (0, 1):
        low, high = bounds[rank : rank + 2]
        layout, place = {}, 0
        for name, tensor in states["train"].items():
            first, last = max(place, low), max(min(place + tensor.numel(), high), max(place, low))
            layout[name] = [0, max(first - low, 0) if last > first else 0, first - place, last - first]
            place += tensor.numel()
        note = target.to_json() | {"dtype": dtype, "lora": lora}
        plain = {"engine": {}, "loop": {"step": step}, "layout": layout, "export": note}
        tensors = {f"{policy}.0": row[low:high].clone() for policy, row in rows.items()}
        tensors["optimizer.exp_avg.0"] = torch.zeros(high - low)
        save_file(tensors, folder / rank_file_name(rank), metadata={k: json.dumps(v) for k, v in plain.items()})
    sizes = {rank_file_name(rank): (folder / rank_file_name(rank)).stat().st_size for rank in (0, 1)}
    marker = {"step": step, "world_size": 2, "facts": {}, "files": sizes}
    (folder / COMPLETE).write_text(json.dumps(marker))
    return folder


def moved(tensors, seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * torch.randn(t.shape, generator=draw) for name, t in tensors.items()}


def run(capsys, *words):
    """Run the command. Return its exit code, and stderr if it failed or stdout if it succeeded."""
    code = wfm_command("convert")(words)
    printed = capsys.readouterr()
    return code, printed.err if code else printed.out


@pytest.fixture
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")


@pytest.fixture
def full(model, tmp_path):
    """Return a full-weights checkpoint, and the parameters of its two policies."""
    parameters, frozen = model.unwrapped_denoiser.named_parameters(), model.find_unused_parameters()
    start = {name: p.detach() for name, p in parameters if name not in frozen}
    states = {"train": moved(start, 1), "ema": moved(start, 2)}
    return write_checkpoint(tmp_path / "step_7", ExportTarget.from_model(model), states), states


@pytest.fixture
def adapter(model, tmp_path):
    """Return a LoRA checkpoint and its weights. `model` is loaded with the same weights."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(model.default_lora_targets))
    model.unwrapped_denoiser.add_adapter(config, adapter_name="default")
    parameters = {name: p for name, p in model.unwrapped_denoiser.named_parameters() if "lora" in name}
    states = {"train": moved({name: p.detach() for name, p in parameters.items()}, 3)}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(states["train"][name])
    target = ExportTarget.from_model(model)
    config = model.unwrapped_denoiser.peft_config["default"]
    settings = adapter_settings(config, target.base)
    folder = write_checkpoint(tmp_path / "step_7", target, states, dtype="bfloat16", lora=settings)
    return folder, Weights(get_peft_model_state_dict(model.unwrapped_denoiser, adapter_name="default"), config)


def pixels(pipe, model):
    pipe.set_progress_bar_config(disable=True)
    call = model.pipeline_call_kwargs(2.0, 32, 32)
    generator = torch.Generator("cpu").manual_seed(5)
    return pipe("a red circle", generator=generator, num_inference_steps=2, output_type="pt", **call).images


def test_a_full_checkpoint_gives_the_files_that_the_run_would_export(model, full, tmp_path, capsys):
    checkpoint, states = full
    assert run(capsys, checkpoint, tmp_path / "out")[0] == 0
    with torch.no_grad():
        for name, parameter in model.unwrapped_denoiser.named_parameters():
            parameter.copy_(states["ema"].get(name, parameter))
    own = Weights(model.unwrapped_denoiser.state_dict())
    export_weights(
        ExportTarget.from_model(model), own, tmp_path / "own", policy="ema", dtype=torch.float32, is_main=True
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "own")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", local_files_only=True)
    assert_close(pixels(pipe, model), pixels(model.pipeline, model), atol=1e-5, rtol=0)


def test_a_long_conversion_shows_that_it_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.01)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown = []

    def wait(args):
        deadline_s = time.monotonic() + 10
        while "so far" not in "".join(shown) and time.monotonic() < deadline_s:
            shown.append(capsys.readouterr().err)
        return "done"

    monkeypatch.setattr(conversion, "convert_checkpoint", wait)
    assert run(capsys, tmp_path, tmp_path / "out")[0] == 0
    assert f"converting {tmp_path}: 0:00 so far\n" in "".join(shown)


def test_policy_and_dtype_can_be_chosen(full, tmp_path, capsys):
    checkpoint, states = full
    code, text = run(capsys, checkpoint, tmp_path / "out", "--policy", "train", "--dtype", "bfloat16")
    assert code == 0
    assert f'DiffusionPipeline.from_pretrained("{tmp_path / "out"}"' in text
    weights = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, tensor in states["train"].items():
        assert torch.equal(weights[name], tensor.bfloat16())


def test_a_lora_checkpoint_gives_the_files_that_the_run_would_export(model, adapter, tmp_path, capsys):
    checkpoint, own = adapter
    assert run(capsys, checkpoint, tmp_path / "out")[0] == 0
    export_weights(
        ExportTarget.from_model(model), own, tmp_path / "own", policy="train", dtype=torch.float32, is_main=True
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "own")


def test_a_merged_lora_gives_the_weights_that_peft_merges(model, adapter, tmp_path, capsys):
    checkpoint, _ = adapter
    assert run(capsys, checkpoint, tmp_path / "out", "--merge", "--dtype", "float32")[0] == 0
    drawn = pixels(model.pipeline, model)
    got = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    model.unwrapped_denoiser.fuse_lora()
    model.unwrapped_denoiser.unload_lora()
    want = model.unwrapped_denoiser.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_close(got[name], tensor, atol=1e-6, rtol=1e-6)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", local_files_only=True)
    assert_close(pixels(pipe, model), drawn, atol=1e-5, rtol=0)


def test_merging_keeps_the_runs_dtype_and_a_lora_has_one(adapter, tmp_path, capsys):
    code, text = run(capsys, adapter[0], tmp_path / "out", "--dtype", "bfloat16")
    assert (code, "always written in float32" in text) == (2, True)
    assert run(capsys, adapter[0], tmp_path / "out", "--merge")[0] == 0
    weights = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.fixture
def foreign_lora(adapter, tmp_path):
    """Write a LoRA as Cosmos-RL does: PEFT names without diffusers' prefix, and alpha only in the config."""

    def write(prefix="", inside="", **changes):
        folder = tmp_path / "theirs" / inside
        folder.mkdir(parents=True)
        tensors = {prefix + name: tensor.contiguous() for name, tensor in adapter[1].tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        targets = sorted(adapter[1].config.target_modules)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "not_of_peft": 1}
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        return tmp_path / "theirs"

    return write


@pytest.mark.parametrize(("prefix", "inside"), [("", ""), ("base_model.model.", "lora"), ("transformer.", "lora")])
def test_a_foreign_lora_is_converted_with_its_scale(prefix, inside, foreign_lora, model, tmp_path, capsys):
    code, text = run(capsys, foreign_lora(prefix, inside), tmp_path / "out")
    assert code == 0
    assert "its layers were not checked" in text
    pipe = DiffusionPipeline.from_pretrained(model.path, local_files_only=True)
    pipe.load_lora_weights(str(tmp_path / "out" / "lora"), weight_name="model.safetensors", adapter_name="default")
    assert pipe.get_active_adapters() == ["default"]
    assert pipe.transformer.transformer_blocks[0].attn.to_k.scaling["default"] == ALPHA / RANK
    assert_close(pixels(pipe, model), pixels(model.pipeline, model), atol=1e-5, rtol=0)


def test_a_foreign_lora_is_checked_against_a_base_and_merged(foreign_lora, model, tmp_path, capsys):
    theirs = foreign_lora()
    assert run(capsys, theirs, tmp_path / "out", "--base", model.path)[0] == 0
    assert run(capsys, theirs, tmp_path / "whole", "--base", model.path, "--merge", "--dtype", "float32")[0] == 0
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "whole", local_files_only=True)
    assert_close(pixels(pipe, model), pixels(model.pipeline, model), atol=1e-5, rtol=0)


def test_an_invalid_foreign_lora_is_refused(foreign_lora, model, tmp_path, capsys):
    theirs = foreign_lora(r=2)
    code, text = run(capsys, theirs, tmp_path / "out", "--base", model.path)
    assert (code, "has rank 4, but rank 2 in its settings" in text) == (2, True)
    assert run(capsys, theirs, tmp_path / "out")[0] == 2
    assert not (tmp_path / "out").exists()
    code, text = run(capsys, theirs, tmp_path / "out", "--merge")
    assert (code, "--merge needs its base pipeline, set --base" in text) == (2, True)


def test_arguments_without_effect_on_a_foreign_lora_are_refused(foreign_lora, tmp_path, capsys):
    theirs = foreign_lora()
    code, text = run(capsys, theirs, tmp_path / "out", "--policy", "ema")
    assert (code, text) == (2, f"error: {theirs} has a single policy: omit --policy\n")
    code, text = run(capsys, theirs, tmp_path / "out", "--dtype", "bfloat16")
    assert (code, "always written in float32" in text) == (2, True)
    assert not (tmp_path / "out").exists()


def test_an_export_that_cannot_be_written_is_a_one_line_error(foreign_lora, model, tmp_path, capsys):
    theirs = foreign_lora()
    (tmp_path / "file").write_text("mine")
    for words in ([], ["--base", model.path]):
        for out in (tmp_path / "file", tmp_path / "file" / "out"):
            code, text = run(capsys, theirs, out, *words)
            assert (code, text.count("\n")) == (2, 1)
            assert f"{out}: the export could not be written (" in text


def test_unusable_checkpoints_are_one_line_errors(full, model, tiny_pipelines, tmp_path, capsys):
    checkpoint, _ = full

    def refused(*words):
        code, text = run(capsys, *words)
        assert code == 2
        assert text.count("\n") == 1
        return text

    out = tmp_path / "out"
    assert "has no policy old; choose one of ema, train" in refused(checkpoint, out, "--policy", "old")
    assert "has full weights and no LoRA" in refused(checkpoint, out, "--merge")
    assert "would replace its source" in refused(checkpoint, checkpoint)
    assert "would replace its source" in refused(checkpoint, tmp_path)
    assert "would replace the base model" in refused(checkpoint, model.path)
    assert "is not a checkpoint" in refused(tmp_path / "nothing", out)
    assert "has other weights than transformer of" in refused(checkpoint, out, "--base", tiny_pipelines("digits"))
    assert "has no transformer" in refused(checkpoint, out, "--base", empty_pipeline(tmp_path))
    (checkpoint / rank_file_name(1)).write_bytes(b"")
    assert "is damaged: wfm_rank00001.safetensors has 0 bytes instead of" in refused(checkpoint, out)
    (checkpoint / rank_file_name(1)).unlink()
    assert "is damaged: wfm_rank00001.safetensors cannot be read (No such" in refused(checkpoint, out)
    assert not out.exists()


def test_rank_files_of_different_steps_are_refused(full, model, tmp_path, capsys):
    checkpoint, states = full
    other = write_checkpoint(tmp_path / "step_9", ExportTarget.from_model(model), states, step=9)
    shutil.copy(other / rank_file_name(1), checkpoint)
    code, text = run(capsys, checkpoint, tmp_path / "out")
    assert code == 2
    assert "wfm_rank00001.safetensors is from step 9, but wfm_rank00000.safetensors is from step 7" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [None, {"base": "somewhere", "parts": ["transformer"], "call": {}}])
def test_a_checkpoint_without_export_settings_is_refused(kept, full, tmp_path, capsys):
    checkpoint, _ = full
    path = checkpoint / rank_file_name(0)
    with safe_open(path, "pt") as file:
        metadata = {name: text for name, text in file.metadata().items() if name != "export"}
    if kept is not None:
        metadata["export"] = json.dumps(kept)
    save_file(load_file(path), path, metadata=metadata)
    marker = json.loads((checkpoint / COMPLETE).read_text())
    marker["files"][rank_file_name(0)] = path.stat().st_size
    (checkpoint / COMPLETE).write_text(json.dumps(marker))
    code, text = run(capsys, checkpoint, tmp_path / "out")
    lacking = "base, call, dtype, lora, parts" if kept is None else "dtype, lora"
    assert (code, text.count("\n")) == (2, 1)
    assert f"{checkpoint} lacks export settings ({lacking}); resume its run" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("merges", [False, True])
def test_too_little_memory_is_a_one_line_error_with_alternatives(model, adapter, tmp_path, capsys, merges):
    note = adapter_settings(adapter[1].config, model.path) | {"r": 2**46}  # matrices larger than the address space
    own = {name: torch.zeros(1) for name, _ in model.unwrapped_denoiser.named_parameters() if "lora" in name}
    checkpoint = write_checkpoint(tmp_path / "step_9", ExportTarget.from_model(model), {"train": own}, lora=note)
    code, text = run(capsys, checkpoint, tmp_path / "out", *(["--merge"] if merges else []))
    assert (code, text.count("\n")) == (2, 1)
    assert text.startswith("error: out of memory on cpu: ")
    assert " GiB more, the peak of the process was " in text
    assert text.endswith("to a machine with memory for the largest tensor of the model in float32\n")
    assert ("change --merge (omit it: the LoRA alone is small)" in text) == merges
    assert not (tmp_path / "out").exists()


def empty_pipeline(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    return folder


def test_pickles_are_read_only_on_request(tmp_path, capsys):
    (tmp_path / "latest").write_text("global_step3")
    code, text = run(capsys, tmp_path, tmp_path.parent / "out")
    assert (code, "add --trust-pickle" in text) == (2, True)
    code, text = run(capsys, tmp_path, tmp_path.parent / "out", "--trust-pickle")
    assert (code, "set --base" in text) == (2, True)
    code, text = run(capsys, tmp_path, tmp_path.parent / "out", "--trust-pickle", "--policy", "ema")
    assert (code, "omit --policy" in text) == (2, True)
