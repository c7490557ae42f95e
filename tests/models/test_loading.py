"""A damaged pipeline folder is one clear error, whatever is damaged; nothing is left random."""

import json
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from families import CASES, each_family
from wfm_ds.errors import ModelError
from wfm_ds.models import registry

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
PROMPTS = ["a red circle on white", "the digit 7"]


@pytest.fixture
def folder(tiny_pipelines, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(tiny_pipelines("sd3"), tmp_path / "pipeline")
    return tmp_path / "pipeline"


def load(folder, **options):
    return registry.load_model(folder, dtype=torch.float32, device="cpu", **options)


def change_json(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cut_in_half(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    "part",
    [
        TRANSFORMER,
        "text_encoder/model.safetensors",
        "text_encoder_3",
        "tokenizer",
        "tokenizer_3/tokenizer.json",
        "scheduler",
        "vae",
    ],
)
def test_a_missing_part_is_an_error(folder, part):
    if (folder / part).is_dir():
        shutil.rmtree(folder / part)
    else:
        (folder / part).unlink()
    with pytest.raises(ModelError, match="copy or download the pipeline again") as raised:
        load(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "part",
    [
        TRANSFORMER,
        "text_encoder_3/model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer/tokenizer.json",
        "transformer/config.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_a_truncated_file_is_an_error(folder, part):
    cut_in_half(folder / part)
    with pytest.raises(ModelError, match="cannot be loaded") as raised:
        load(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "file", [TRANSFORMER, "text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"]
)
def test_a_single_missing_weight_is_an_error(folder, file):
    weights = load_file(folder / file)
    gone = sorted(weights)[3]
    del weights[gone]
    save_file(weights, folder / file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights") as raised:
        load(folder)
    assert gone in str(raised.value)


def test_weights_of_another_size_are_an_error(folder):
    change_json(folder / "transformer/config.json", num_attention_heads=3)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def test_pickled_weights_are_never_opened(folder):
    torch.save(load_file(folder / TRANSFORMER), folder / "transformer/diffusion_pytorch_model.bin")
    (folder / TRANSFORMER).unlink()
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model\.safetensors"):
        load(folder)


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


@pytest.mark.parametrize("length", ["8", 0, 1.5, True])
def test_a_stored_text_length_that_is_no_length_is_an_error(folder, length):
    change_json(folder / "call.json", max_sequence_length=length)
    with pytest.raises(ModelError, match=r"call\.json: max_sequence_length must be a positive integer"):
        load(folder)


@each_family()
def test_loading_shows_no_bars_and_ignores_no_key(tiny_pipelines, family, capfd, caplog):
    folder = tiny_pipelines(family)
    capfd.readouterr()
    load(folder, **CASES[family].load_options)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert [m for record in caplog.records if "the guardrail is off" not in (m := record.getMessage())] == []
