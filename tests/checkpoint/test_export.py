"""Exports: plain diffusers loads them and generates the same pixels as the live model."""

import json
import os
import resource
import weakref

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from folders import contents
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.errors import ModelError, UserError
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import export_weights
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.types import Prompt

PROMPTS = ["a red circle on white", "the digit 7"]
MAIN = {"policy": "train", "dtype": torch.float32, "is_main": True}


class FullWeights:
    """A fully trained denoiser in one process."""

    uses_lora = False

    def __init__(self, module):
        self.module = module

    def lora_config(self):
        return None

    def iter_full_tensors(self, policy):
        for name, tensor in self.module.state_dict().items():
            yield name, tensor.float()


class Adapter:
    """One PEFT adapter of a denoiser, in one process."""

    uses_lora = True

    def __init__(self, module):
        self.module = module

    def lora_config(self):
        return self.module.peft_config["default"]

    def iter_full_tensors(self, policy):
        yield from get_peft_model_state_dict(self.module, adapter_name="default").items()


class Changed:
    """A tensor source with changes: `edit` maps each item to the items that replace it."""

    def __init__(self, source, edit):
        self.source, self.edit, self.uses_lora = source, edit, source.uses_lora
        self.ended = False

    def lora_config(self):
        return self.source.lora_config()

    def iter_full_tensors(self, policy):
        for name, tensor in self.source.iter_full_tensors(policy):
            yield from self.edit(name, tensor)
        self.ended = True


@pytest.fixture
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")


@pytest.fixture
def trained(model):
    """Return the model after an update of every weight, and its tensor source."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.denoiser.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model, FullWeights(model.denoiser)


def add_adapter(model, *, rank=4, alpha=9.0, b_std=0.3):
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(model.default_lora_targets), init_lora_weights="gaussian"
    )
    model.denoiser.add_adapter(config, adapter_name="default")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.denoiser.named_parameters():
            if "lora_B" in name:
                weight.copy_(b_std * torch.randn(weight.shape, generator=generator))
    return Adapter(model.denoiser)


@pytest.fixture
def adapted(model):
    return model, add_adapter(model)


def pixels(pipe, call):
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in (11, 12)]
    return pipe(
        PROMPTS, negative_prompt=["", ""], generator=generators, num_inference_steps=3, output_type="pt", **call
    ).images


def drawn_by(model):
    return pixels(model.pipeline, model.pipeline_call_kwargs(2.0, 32, 32))


def drawn_from(folder, model):
    return pixels(plain(folder), model.pipeline_call_kwargs(2.0, 32, 32))


def plain(folder):
    return DiffusionPipeline.from_pretrained(folder, use_safetensors=True, local_files_only=True)


# LoRA


def test_the_loading_lines_give_the_image_of_the_lora_model(adapted, tmp_path):
    model, source = adapted
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "with space" / "step_3", **MAIN)
    assert folder == tmp_path / "with space" / "step_3" / "lora"
    without = pixels(plain(model.path), model.pipeline_call_kwargs(2.0, 32, 32))
    lines = loading_lines(model.path, folder, lora=True)
    assert len(lines.splitlines()) == 3
    pipe = run_lines(lines)
    assert pipe.get_active_adapters() == ["default"]
    layer = pipe.transformer.transformer_blocks[0].attn.to_k
    assert layer.scaling["default"] == 9.0 / 4  # alpha / rank; it would be 1 without metadata in the header
    got = pixels(pipe, model.pipeline_call_kwargs(2.0, 32, 32))
    assert_close(got, drawn_by(model), atol=1e-5, rtol=0)
    assert (got - without).abs().max() > 1e-2


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_an_adapter_of_a_base_in_fewer_bits_loads_into_the_plain_pipeline_in_bfloat16(precision, model, tmp_path):
    quantise_base(model.denoiser, model.block_classes, precision, torch.float32, torch.device("cpu"))
    source = add_adapter(model)
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "out", **MAIN)
    pipe = DiffusionPipeline.from_pretrained(model.path, torch_dtype=torch.bfloat16, local_files_only=True)
    # Both pipelines get the same noise: in torch 2.11, random numbers in bfloat16 differ from those in float32.
    noise = torch.randn(len(PROMPTS), *model.latent_shape(32, 32, 1), generator=torch.Generator().manual_seed(11))
    call = model.pipeline_call_kwargs(2.0, 32, 32) | {"latents": noise}
    without = pixels(pipe, call)
    pipe.load_lora_weights(str(folder), weight_name="model.safetensors", adapter_name="default")
    trained = {n: p for n, p in model.denoiser.named_parameters() if ".lora_" in n}
    loaded = dict(pipe.transformer.named_parameters())
    assert trained
    assert all(torch.equal(loaded[name], tensor.to(torch.bfloat16)) for name, tensor in trained.items())
    got = pixels(pipe, call)
    assert (got - pixels(model.pipeline, call)).float().norm() < 0.5 * (got - without).float().norm()


def test_lora_header_and_config_say_the_same_and_tensors_stay_float32(adapted, tmp_path):
    model, source = adapted
    target = ExportTarget.from_model(model)
    folder = export_weights(target, source, tmp_path / "out", **MAIN | {"dtype": torch.bfloat16})
    with safe_open(folder / "model.safetensors", "pt") as file:
        header, names = file.metadata(), list(file.keys())
    exported = load_file(folder / "model.safetensors")
    wanted = {f"transformer.{name}": tensor for name, tensor in source.iter_full_tensors("train")}
    assert header["format"] == "pt"
    assert names
    assert set(names) == wanted.keys()
    assert all(torch.equal(exported[n], t) and exported[n].dtype == torch.float32 for n, t in wanted.items())
    metadata = json.loads(header["lora_adapter_metadata"])
    config = json.loads((folder / "adapter_config.json").read_text())
    # Only adapter_config.json names the local folder of the base model, because weight files are shared.
    assert metadata == {f"transformer.{k}": v for k, v in (config | {"base_model_name_or_path": None}).items()}
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 9.0, "LORA")
    assert config["target_modules"] == sorted(model.default_lora_targets)
    assert config["base_model_name_or_path"] == str(model.path)


def test_adapter_that_changes_nothing_is_exported_with_a_warning(model, tmp_path, caplog):
    source = add_adapter(model, b_std=0.0)
    assert export_weights(ExportTarget.from_model(model), source, tmp_path / "out", **MAIN).is_dir()
    assert "this adapter has no effect" in caplog.text


def rename(old, new):
    return lambda name, tensor: [(name.replace(old, new), tensor)]


def change(end, edit):
    """Return an edit of the tensors with this name suffix; `edit` returns None to drop a tensor."""

    def apply(name, tensor):
        tensor = edit(tensor) if name.endswith(end) else tensor
        return [] if tensor is None else [(name, tensor)]

    return apply


def assert_refused(model, source, out, edit, message):
    broken = Changed(source, edit)
    with pytest.raises(ModelError, match=message):
        export_weights(ExportTarget.from_model(model), broken, out, **MAIN)
    assert broken.ended  # the stream was read to its end because other ranks take part in the gathers


WRONG_ADAPTERS = [
    (change("0.attn.to_k.lora_B.weight", lambda t: None), r"blocks\.0\.attn\.to_k: .* do not fit a layer \[32, 32\]"),
    (change("lora_A.weight", lambda t: t[:2]), "of rank 4 do not fit"),
    (rename("transformer_blocks", "blocks"), "do not fit any layer"),
    (rename(".weight", ".default.weight"), "not the name of a LoRA tensor"),
    (change("", lambda t: None), "matched no layer"),
    (change("", lambda t: t.new_empty(0)), "not gathered"),
    (change("to_k.lora_A.weight", lambda t: t * float("nan")), "NaN"),
]


def test_wrong_adapter_is_refused_and_leaves_nothing(adapted, tmp_path):
    for edit, message in WRONG_ADAPTERS:
        assert_refused(*adapted, tmp_path / "out", edit, message)
        assert list(tmp_path.iterdir()) == []


# Full training


def test_shards_hold_every_tensor_once_and_plain_diffusers_loads_them(trained, tmp_path):
    model, source = trained
    export = export_weights(ExportTarget.from_model(model), source, tmp_path / "out", shard_bytes=60_000, **MAIN)
    assert export == tmp_path / "out"
    assert_close(drawn_from(export, model), drawn_by(model), atol=1e-5, rtol=0)
    folder = export / "transformer"
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    found, total = {}, 0
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        tensors = load_file(shard)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 60_000 or len(tensors) == 1
        assert all(index["weight_map"][name] == shard.name for name in tensors)
        found, total = found | tensors, total + size
    assert len(shards) > 3
    assert [s.name for s in shards] == [
        f"diffusion_pytorch_model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert index["metadata"]["total_size"] == total
    expected = model.denoiser.state_dict()
    assert "pos_embed.pos_embed" in expected  # a persistent buffer, not a parameter
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_each_tensor_is_written_and_freed_before_the_next_is_gathered(model, tmp_path):
    """Memory holds one tensor at a time, for any size of the model and its files."""
    alive, on_disk, made = [], [], [0]

    class Stream(FullWeights):
        def iter_full_tensors(self, policy):
            for name, tensor in self.module.state_dict().items():
                alive.append([tensor for tensor in handed_out if tensor() is not None])
                files = (tmp_path / ".out.wfm-tmp" / "transformer").glob("*.safetensors")
                on_disk.append(sum(512 * file.stat().st_blocks for file in files) >= made[0])
                handed_out.append(weakref.ref(copy := tensor.detach().clone()))
                made[0] += copy.nbytes
                yield name, copy
                del copy

    handed_out = []
    export_weights(ExportTarget.from_model(model), Stream(model.denoiser), tmp_path / "out", shard_bytes=60_000, **MAIN)
    assert len(alive) > 30
    assert not any(alive)
    assert all(on_disk)


def test_a_full_export_has_the_requested_dtype_and_the_models_config(trained, tmp_path):
    model, source = trained
    target = ExportTarget.from_model(model)
    folder = export_weights(target, source, tmp_path / "out", **MAIN | {"dtype": torch.bfloat16}) / "transformer"
    exported = load_file(folder / "diffusion_pytorch_model.safetensors")
    for name, tensor in model.denoiser.state_dict().items():
        assert torch.equal(exported[name], tensor.to(torch.bfloat16))
    config, base = (json.loads((f / "config.json").read_text()) for f in (folder, model.path / "transformer"))
    assert config == base  # it does not contain the local path
    assert "_name_or_path" in model.config


def test_a_full_export_has_hard_links_of_unchanged_files_and_the_image_of_the_model(trained, tmp_path):
    model, source = trained
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "out", **MAIN)
    got = drawn_from(folder, model)
    assert_close(got, drawn_by(model), atol=1e-5, rtol=0)
    assert (got - drawn_from(model.path, model)).abs().max() > 1e-2
    base_inodes = {os.stat(file).st_ino for file in model.path.rglob("*") if file.is_file()}
    shared, own = set(), set()
    for file in folder.rglob("*"):
        if file.is_file():
            (shared if file.stat().st_ino in base_inodes else own).add(file.relative_to(folder).as_posix())
    assert own == {"transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"}
    everything = {f.relative_to(model.path).as_posix() for f in model.path.rglob("*") if f.is_file()}
    assert shared == {name for name in everything if not name.startswith("transformer/")}
    assert {"model_index.json", "call.json", "vae/config.json"} <= shared


def add_one(name, tensor):
    return [(name, tensor), ("proj_out.lora_A.weight", tensor)] if name == "proj_out.weight" else [(name, tensor)]


WRONG_WEIGHTS = [
    (change("proj_out.bias", lambda t: None), r"1 tensors .* not exported, e\.g\. proj_out\.bias"),
    (add_one, r"proj_out\.lora_A\.weight: unexpected or duplicate tensor of the denoiser"),
    (change("proj_out.bias", lambda t: t[:1]), r"proj_out\.bias is \[1\], but the model has \[16\]"),
    (change("", lambda t: t.new_empty(0)), "not gathered"),
    (change("proj_out.bias", lambda t: t / 0), "NaN or infinity"),
]


def test_wrong_weights_are_refused_and_the_last_export_stays(trained, tmp_path):
    model, source = trained
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "out", **MAIN)
    before = contents(folder)
    for edit, message in WRONG_WEIGHTS:
        assert_refused(model, source, folder, edit, message)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert contents(folder) == before


# Folders and ranks


def test_a_later_export_replaces_earlier_and_incomplete_ones(adapted, tmp_path):
    model, source = adapted
    out = tmp_path / "step_3"
    (tmp_path / ".step_3.wfm-tmp" / "lora").mkdir(parents=True)
    (tmp_path / ".step_3.wfm-tmp" / "torn").write_text("half")
    export_weights(ExportTarget.from_model(model), source, out, **MAIN)
    with torch.no_grad():
        for tensor in get_peft_model_state_dict(model.denoiser, adapter_name="default").values():
            tensor.mul_(2)
    folder = export_weights(ExportTarget.from_model(model), source, out, **MAIN)
    exported = load_file(folder / "model.safetensors")
    for name, tensor in source.iter_full_tensors("train"):
        assert torch.equal(exported[f"transformer.{name}"], tensor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3"]
    assert sorted(path.name for path in out.rglob("*")) == ["adapter_config.json", "lora", "model.safetensors"]


def test_other_ranks_iterate_to_the_end_and_write_nothing(adapted, tmp_path):
    model, source = adapted
    watched = Changed(source, lambda name, tensor: [(name, None)])
    folder = export_weights(ExportTarget.from_model(model), watched, tmp_path / "out", **MAIN | {"is_main": False})
    assert watched.ended
    assert folder == tmp_path / "out" / "lora"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_a_user_error_and_the_last_export_stays(trained, tmp_path):
    model, source = trained
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "out", **MAIN)
    before = contents(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # a file size limit takes the same error path as a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    watched = Changed(source, lambda name, tensor: [(name, tensor * 2)])
    try:
        with pytest.raises(UserError, match=r"out: the export could not be written \(.*\); free space"):
            export_weights(ExportTarget.from_model(model), watched, folder, **MAIN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert watched.ended
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    watched.ended = False
    with pytest.raises(UserError, match="could not be written"):
        export_weights(ExportTarget.from_model(model), watched, folder / "model_index.json" / "step_3", **MAIN)
    assert watched.ended


def test_base_models_and_folders_of_users_are_never_replaced(trained, tmp_path):
    model, source = trained
    before = sorted(model.path.rglob("*"))
    for out in (model.path, model.path.parent):
        with pytest.raises(ModelError, match="would replace the base model"):
            export_weights(ExportTarget.from_model(model), source, out, **MAIN)
    assert sorted(model.path.rglob("*")) == before
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="is not an export"):
        export_weights(ExportTarget.from_model(model), source, tmp_path, **MAIN)
    assert (tmp_path / "thesis.txt").exists()


# Code for users


def run_lines(lines):
    names = {}
    exec(lines, names)  # the loading code shown to users
    return names["pipe"]


@pytest.mark.parametrize("family", ["sd3", "wan21"])
def test_loading_lines_and_call_json_load_a_few_step_lora(tiny_pipelines, tmp_path, family):
    """SD3's pipeline takes the levels as an argument. Wan's needs another scheduler."""
    model = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu")
    frames = 5 if model.is_video else 1
    sampling = SamplingRecipe(height=32, width=32, num_frames=frames, eval_steps=4, eval_grid="even")
    source, target = add_adapter(model), ExportTarget.from_model(model, sampling)
    assert ExportTarget.from_json(json.loads(json.dumps(target.to_json()))) == target  # as in a checkpoint
    folder = export_weights(target, source, tmp_path / "step_3", **MAIN)
    pipe = run_lines(loading_lines(model.path, folder, lora=True))
    pipe.set_progress_bar_config(disable=True)
    call = json.loads((folder / "call.json").read_text()) | {"prompt": PROMPTS[0], "output_type": "latent"}
    generator = torch.Generator("cpu").manual_seed(11)
    sampler = Sampler(
        model=model, text_cache=TextCache(model), settings=sampling, forward=CountingForward(model.denoise)
    )
    prompt = Prompt(id="", text=PROMPTS[0])
    want = sampler.generate("validation", [prompt], [11], sampler.evaluation_plan()).clean_latents
    assert_close(pipe(**call, generator=generator)[0], want, atol=1e-5, rtol=0)
    assert (folder / "scheduler_config.json").exists() == (family == "wan21")


def test_loading_lines_load_the_scheduler_of_a_lora_trained_with_noisy_steps(tiny_pipelines, tmp_path):
    model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    keys = {"solver": "cps", "noise_level": 1.0, "eval_solver": "cps", "eval_grid": "even", "eval_steps": 3}
    target = ExportTarget.from_model(model, SamplingRecipe(height=32, width=32, **keys))
    folder = export_weights(target, add_adapter(model), tmp_path / "step_3", **MAIN)
    assert json.loads((folder / "scheduler_config.json").read_text())["stochastic_sampling"] is True
    pipe = run_lines(loading_lines(model.path, folder, lora=True))
    pipe.set_progress_bar_config(disable=True)
    call = json.loads((folder / "call.json").read_text()) | {"prompt": PROMPTS[0], "output_type": "latent"}
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)  # of the noise in the steps
        drawn.append(pipe(**call, generator=torch.Generator("cpu").manual_seed(11))[0])
    assert torch.equal(drawn[0], drawn[1])
    assert (drawn[2] - drawn[0]).abs().max() > 0.1


def test_loading_lines_load_a_pipeline_without_t5(trained, tmp_path):
    model, source = trained
    model.pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    model.pipeline.save_pretrained(tmp_path / "base")
    model.path = tmp_path / "base"
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "step_3", **MAIN)
    pipe = run_lines(loading_lines(model.path, folder, lora=False))
    assert pipe.text_encoder_3 is None
    assert_close(pixels(pipe, model.pipeline_call_kwargs(2.0, 32, 32)), drawn_by(model), atol=1e-5, rtol=0)


def test_export_names_the_prompt_template_that_was_trained_with(tiny_pipelines, tmp_path):
    model = registry.load_model(tiny_pipelines("sana"), dtype=torch.float32, device="cpu", prompt_template="stock")
    folder = export_weights(ExportTarget.from_model(model), FullWeights(model.denoiser), tmp_path / "out", **MAIN)
    assert registry.load_model(folder, dtype=torch.float32, device="cpu").instruction == model.instruction
    call = json.loads((folder / "call.json").read_text())
    assert call == json.loads((model.path / "call.json").read_text()) | {"complex_human_instruction": model.instruction}


def test_a_lora_names_the_prompt_template_that_it_was_trained_with(tiny_pipelines, tmp_path):
    for template, named in (("stock", True), ("none", False)):  # the folder's call.json specifies none
        model = registry.load_model(tiny_pipelines("sana"), dtype=torch.float32, device="cpu", prompt_template=template)
        folder = export_weights(ExportTarget.from_model(model), add_adapter(model), tmp_path / template, **MAIN)
        assert (folder / "call.json").exists() == named
        assert (f"arguments in {folder / 'call.json'}" in loading_lines(model.path, folder, lora=True)) == named
    call = json.loads((tmp_path / "stock" / "lora" / "call.json").read_text())
    assert call["complex_human_instruction"]


def test_loading_lines_mention_the_safety_checker_of_a_pipeline(tiny_pipelines):
    for family, said in (("cosmos25", True), ("sana", False)):
        folder = tiny_pipelines(family)
        lines = loading_lines(folder, folder, lora=False)
        assert ("unless you pass safety_checker=...:\npipe = " in lines) == said
    assert lines.splitlines()[-1] == f"pipe = DiffusionPipeline.from_pretrained({json.dumps(str(folder))})"


def test_export_names_the_text_length_that_was_trained_with(trained, tmp_path):
    model, source = trained
    stored = (model.path / "call.json").read_text()
    model.max_sequence_length = 8  # the folder specifies 16
    folder = export_weights(ExportTarget.from_model(model), source, tmp_path / "out", **MAIN)
    assert registry.load_model(folder, dtype=torch.float32, device="cpu").max_sequence_length == 8
    assert json.loads((folder / "call.json").read_text()) == json.loads(stored) | {"max_sequence_length": 8}
    assert (model.path / "call.json").read_text() == stored
