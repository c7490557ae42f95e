import json
import sys
from importlib.machinery import PathFinder

import pytest
import torch

from each_case import check_each
from wfm_ds import models
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.assets import language_folders
from wfm_ds.models.sd3 import StableDiffusion3
from wfm_ds.models.tiny import FAMILIES


def tensors(model):
    return {name: tensor.clone() for name, tensor in model.denoiser.state_dict().items()}


def index_folder(tmp_path, text):
    (tmp_path / "model_index.json").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_every_tiny_pipeline_has_a_family(tiny_pipelines):
    assert registry.model_families()["sd3"] is StableDiffusion3
    assert {registry.find_family(tiny_pipelines(family)) for family in FAMILIES} == set(
        registry.model_families().values()
    )


def test_a_family_is_found_by_being_in_the_folder(tmp_path, monkeypatch):
    source = "from wfm_ds.models.sd3 import StableDiffusion3\nclass Other(StableDiffusion3):\n    family = 'other'\n"
    (tmp_path / "other_family.py").write_text(source)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    assert PathFinder.find_spec("wfm_ds.models.other_family", models.__path__)
    try:
        found = registry.model_families.__wrapped__()
    finally:
        sys.modules.pop("wfm_ds.models.other_family", None)
    assert found.keys() == registry.model_families().keys() | {"other"}


def test_a_path_of_a_folder_is_returned_unchanged(tiny_pipelines):
    assert registry.resolve_pipeline(tiny_pipelines("sd3")) == tiny_pipelines("sd3")
    assert registry.resolve_pipeline(str(tiny_pipelines("digits"))) == tiny_pipelines("digits")
    assert registry.find_family(tiny_pipelines("digits")) is StableDiffusion3


@check_each(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "must contain a JSON object, got list"),
        ("{}", "class None are not supported; supported: .*StableDiffusion3Pipeline"),
        (json.dumps({"_class_name": "FluxPipeline"}), "FluxPipeline are not supported"),
        (json.dumps({"_class_name": ["custom.py", "Mine"]}), "not supported"),
        (json.dumps({"_class_name": "LTX2ImageToVideoPipeline"}), "not supported: only the text-to-video pipeline"),
        (
            json.dumps({"_class_name": "HunyuanVideo15ImageToVideoPipeline"}),
            "not supported: only the text-to-video pipeline of HunyuanVideo-1.5",
        ),
    ],
)
def test_an_index_that_names_no_known_family_is_an_error(tmp_path, text, message):
    folder = index_folder(tmp_path, text)
    with pytest.raises(ModelError, match=message) as raised:
        registry.resolve_pipeline(folder)
    assert str(folder) in str(raised.value)


def test_a_folder_without_a_pipeline_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="org/model does not exist"):
        registry.resolve_pipeline(tmp_path / "org/model")
    with pytest.raises(ModelError, match=r"has no model_index\.json"):
        registry.resolve_pipeline(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    for path in (tmp_path, "tiny:qwen3vl"):
        with pytest.raises(ModelError, match=r"is a vision-language model: use data\.kind: llava"):
            registry.resolve_pipeline(path)
    for content in (b"[" * 99999, b"\xff\xfe\x00"):
        (tmp_path / "model_index.json").write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read"):
            registry.resolve_pipeline(tmp_path)
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        registry.resolve_pipeline(tmp_path / "weights.safetensors")


def test_a_tiny_pipeline_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path))
    folder = registry.resolve_pipeline("tiny:sd3")
    made_at = (folder / "model_index.json").stat().st_mtime_ns
    assert registry.resolve_pipeline("tiny:sd3") == folder
    assert (folder / "model_index.json").stat().st_mtime_ns == made_at
    assert folder.is_relative_to(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["sd3"]  # the temporary folder is removed


def test_the_slower_of_two_writers_uses_the_other_folder(tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text(name)
    registry.publish_folder(tmp_path / "mine", tmp_path / "theirs")
    assert (tmp_path / "theirs/owner").read_text() == "theirs"


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WFM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set WFM_CACHE to a writable folder"):
        registry.resolve_pipeline("tiny:sd3")


@check_each("family", ["sdxl", "", "../x"])
def test_an_unknown_tiny_family_is_an_error(tmp_path, monkeypatch, family):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=f"is not a tiny pipeline; use one of {', '.join(FAMILIES)}"):
        registry.resolve_pipeline(f"tiny:{family}")


def test_a_pipeline_is_refused_as_a_language_model():
    with pytest.raises(ModelError, match=r"^sd3 is not a tiny vision-language model; use one of qwen25vl, "):
        language_folders.locate_language_model("tiny:sd3")


def test_an_unreadable_configuration_is_an_error(tmp_path):
    (tmp_path / "config.json").symlink_to("/proc/self/mem")  # a regular file whose first bytes cannot be read
    with pytest.raises(ModelError, match=r"config\.json cannot be read \(Input/output error\)"):
        registry.resolve_pipeline(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_depend_only_on_the_seed(tiny_pipelines, dtype):
    model = registry.load_model(tiny_pipelines("sd3"), dtype=dtype, device="cpu")
    denoiser, pretrained = model.denoiser, tensors(model)
    registry.randomize_denoiser(model, 1)
    first = tensors(model)
    torch.manual_seed(99)
    registry.randomize_denoiser(model, 1)
    second = tensors(model)
    registry.randomize_denoiser(model, 2)
    third = tensors(model)
    assert model.denoiser is denoiser is model.pipeline.transformer
    name = "transformer_blocks.0.attn.to_q.weight"
    assert not torch.equal(first[name], pretrained[name])
    assert not torch.equal(first[name], third[name])
    for key in pretrained:
        assert torch.equal(first[key], second[key])
        assert first[key].dtype == pretrained[key].dtype


def test_the_error_for_an_original_cosmos_checkpoint_names_the_conversion_script(tmp_path):
    file = tmp_path / "Cosmos-Predict2.5-14B" / "e21d_ema_bf16.pt"
    file.parent.mkdir()
    file.touch()
    with pytest.raises(
        ModelError, match=r"--transformer_type Cosmos-2.5-Predict-Base-14B --transformer_ckpt_path .*pt "
    ):
        registry.locate_pipeline(file)
