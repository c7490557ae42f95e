"""Any damage to a pipeline folder raises one clear error; no weights keep random values."""

import shutil
from functools import partial

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from each_case import check_each
from families import CASES, change_json, each_family, load_tiny
from wfm_ds.errors import ModelError
from wfm_ds.models.assets.meta_loading import load_on_meta_device

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
PROMPTS = ["a red circle on white", "the digit 7"]


@pytest.fixture
def folder(tiny_pipelines, tmp_path):
    """Return a copy of the tiny pipeline that a test may damage."""
    shutil.copytree(tiny_pipelines("sd3"), tmp_path / "pipeline")
    return tmp_path / "pipeline"


def load(folder, **options):
    return load_tiny(folder, "sd3", **options)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def cut_in_half(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def remove_weight(file):
    weights = load_file(file)
    del weights[gone := sorted(weights)[3]]
    save_file(weights, file, metadata={"format": "pt"})
    return gone


WEIGHTS = (TRANSFORMER, "text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors")
MISSING = (*WEIGHTS[:2], "text_encoder_3", "tokenizer", "tokenizer_3/tokenizer.json", "scheduler", "vae")
TRUNCATED = (
    *(*WEIGHTS[1:], TRANSFORMER, "text_encoder_3/model.safetensors"),
    *("tokenizer/tokenizer.json", "transformer/config.json", "scheduler/scheduler_config.json"),
)


@check_each(
    ("damage", "part", "says"),
    [
        *((remove, part, "copy or download the pipeline again") for part in MISSING),
        *((cut_in_half, part, "cannot be (loaded|read)") for part in TRUNCATED),
        *((remove_weight, part, "lacks 1 weights of") for part in WEIGHTS),
    ],
)
def test_a_damaged_part_is_a_one_line_error(tiny_pipelines, tmp_path, damage, part, says):
    folder = shutil.copytree(tiny_pipelines("sd3"), tmp_path / "pipeline")
    gone = damage(folder / part)
    with pytest.raises(ModelError, match=says) as raised:
        load(folder)
    message = str(raised.value)
    assert str(folder) in message
    assert f"e.g. {gone}" in message or gone is None
    assert "\n" not in message


def test_weights_of_another_size_are_an_error(folder):
    change_json(folder / "transformer/config.json", num_attention_heads=3)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def to_float8(folder):
    file = folder / TRANSFORMER
    weights = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def add_scales(folder, file=TRANSFORMER):
    weights = load_file(folder / file)
    name = sorted(name for name, tensor in weights.items() if tensor.ndim == 2)[0]
    scale = {f"{name.removesuffix('.weight')}.scale_weight": torch.ones(1)}
    save_file(weights | scale, folder / file, metadata={"format": "pt"})


def replace_weights(folder, name):
    torch.save(load_file(folder / TRANSFORMER), folder / "transformer" / name)
    (folder / TRANSFORMER).unlink()


def change_config(folder, part, **values):
    change_json(folder / part / "config.json", **values)


def nest(file, depth=100_000):
    file.write_text("[" * depth)


ORIGINAL = "use the original pipeline, with F32, BF16 or F16 weights in safetensors files"
UNSUITABLE = [
    (to_float8, f"transformer: weights are stored as F8_E4M3; {ORIGINAL}"),
    (
        partial(change_config, part="vae", quantization_config={"quant_method": "modelopt"}),
        f"vae/config.json: the weights are quantized (modelopt); {ORIGINAL}",
    ),
    (
        partial(change_config, part="text_encoder", quantization_config={"load_in_8bit": True}),
        f"text_encoder/config.json: the weights are quantized (an unknown method); {ORIGINAL}",
    ),
    (lambda folder: replace_weights(folder, "model.gguf"), f"weights (model.gguf) are quantized (GGUF); {ORIGINAL}"),
    (
        lambda folder: replace_weights(folder, "diffusion_pytorch_model.bin"),
        f"(diffusion_pytorch_model.bin) are not in safetensors, and pickled files can run code; {ORIGINAL}",
    ),
    (
        partial(change_config, part="transformer", num_layers=10**12),
        "num_layers is 1000000000000, but at most 10000 is plausible; correct the file",
    ),
    (partial(change_config, part="text_encoder_3", num_layers=10**12), "at most 10000 is plausible"),
    (
        lambda folder: change_json(folder / "scheduler/scheduler_config.json", num_train_timesteps=10**12),
        "num_train_timesteps is 1000000000000, but at most 1000000 is plausible; correct the file",
    ),
    (lambda folder: nest(folder / "vae/config.json"), "vae/config.json cannot be read"),
    (lambda folder: nest(folder / "model_index.json"), "model_index.json cannot be read"),
    (lambda folder: change_json(folder / "model_index.json", **{"../vae": ["a", "b"]}), "'../vae' is not a component"),
]


@check_each(("damage", "says"), UNSUITABLE)
def test_weights_that_cannot_be_trained_are_named_also_without_loading_them(tiny_pipelines, tmp_path, damage, says):
    folder = shutil.copytree(tiny_pipelines("sd3"), tmp_path / "pipeline")
    damage(folder)
    for load_it in (load, lambda path: load_on_meta_device(path, dtype=torch.float32)):
        with pytest.raises(ModelError) as raised:
            load_it(folder)
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)


@check_each("file", WEIGHTS)
def test_tensors_that_the_network_does_not_use_are_refused(tiny_pipelines, tmp_path, file):
    folder = shutil.copytree(tiny_pipelines("sd3"), tmp_path / "pipeline")
    add_scales(folder, file)
    with pytest.raises(ModelError, match=r"has 1 weights that \w+ does not use, e\.g\. \S+\.scale_weight: .*original"):
        load(folder)


def test_heads_and_old_buffers_of_a_text_encoder_are_ignored(folder):
    file = folder / "text_encoder/model.safetensors"
    more = {"lm_head.weight": torch.ones(2, 2), "text_model.embeddings.position_ids": torch.arange(16)[None]}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    assert load(folder).encode_text(PROMPTS)


def test_a_null_part_that_the_family_needs_is_named(folder):
    change_json(folder / "model_index.json", vae=[None, None])
    with pytest.raises(ModelError, match="has no vae, but StableDiffusion3Pipeline needs it"):
        load(folder)


def test_without_t5_the_context_ends_in_zeros_as_in_the_stock_pipeline(folder):
    change_json(folder / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / part)
    model = load(folder)
    stock = DiffusionPipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None, local_files_only=True)
    conditioning = model.encode_text(PROMPTS)
    want = stock.encode_prompt(*[PROMPTS] * 3, do_classifier_free_guidance=False, max_sequence_length=16)
    torch.testing.assert_close(conditioning["prompt_embeds"], want[0], rtol=0, atol=1e-5)
    assert conditioning["prompt_embeds"].shape == (2, 16 + 16, 64)
    assert not conditioning["prompt_embeds"][:, 16:].any()
    assert model.denoise(torch.randn(2, 4, 8, 8), torch.ones(2), conditioning).isfinite().all()


def test_text_length_comes_from_the_argument_then_the_folder_then_the_pipeline(folder):
    assert load(folder, max_sequence_length=5).encode_text(PROMPTS)["prompt_embeds"].shape[1] == 16 + 5
    assert load(folder).max_sequence_length == 16
    (folder / "call.json").unlink()
    assert load(folder).max_sequence_length == 256


@check_each("length", ["8", 0, 1.5, True])
def test_a_stored_text_length_that_is_no_length_is_an_error(folder, length):
    change_json(folder / "call.json", max_sequence_length=length)
    with pytest.raises(ModelError, match=r"call\.json: max_sequence_length must be a positive integer"):
        load(folder)


@each_family()
def test_loading_shows_no_bars_and_ignores_no_key(tiny_pipelines, family, capfd, caplog):
    folder = tiny_pipelines(family)
    capfd.readouterr()
    caplog.clear()
    load(folder, **CASES[family].load_options)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert [m for record in caplog.records if "the guardrail is off" not in (m := record.getMessage())] == []


def test_a_network_class_of_another_package_is_loaded_and_checked_like_one_of_diffusers(folder, tmp_path, monkeypatch):
    (tmp_path / "other_networks.py").write_text(
        "from diffusers import ModelMixin, SD3Transformer2DModel\n\nclass MyNetwork(SD3Transformer2DModel):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = load(folder, dtype=torch.bfloat16).unwrapped_denoiser.state_dict()
    change_json(folder / "model_index.json", transformer=["other_networks", "MyNetwork"])
    network = load(folder, dtype=torch.bfloat16).unwrapped_denoiser
    assert type(network).__name__ == "MyNetwork"
    torch.testing.assert_close(network.state_dict(), expected, rtol=0, atol=0)  # compares dtypes too
    shapes = load_on_meta_device(folder, dtype=torch.bfloat16).unwrapped_denoiser.state_dict()
    assert {name: w.shape for name, w in shapes.items()} == {name: w.shape for name, w in expected.items()}
    add_scales(folder)
    with pytest.raises(ModelError, match=r"has 1 weights that MyNetwork does not use"):
        load(folder)
    (tmp_path / "broken_networks.py").write_text("raise RuntimeError('needs a GPU')\n")
    for package in ("absent_package", ".relative", "broken_networks"):
        change_json(folder / "model_index.json", transformer=[package, "MyNetwork"])
        for load_it in (load, lambda path: load_on_meta_device(path, dtype=torch.float32)):
            with pytest.raises(ModelError, match=rf"{package}\.MyNetwork, which cannot be imported .*; install"):
                load_it(folder)
