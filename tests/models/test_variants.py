"""Pipeline folders with variant weights only (`*.bf16.safetensors`), as in some repositories."""

import shutil

import pytest
import torch
from diffusers import DiffusionPipeline

from wfm_ds.errors import ModelError
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.export.target import FolderWeights
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import weights_dtype
from wfm_ds.models.assets.weight_files import fingerprint_folders, parse_variant, pipeline_variant, select_variant

pytestmark = pytest.mark.slow

BASE = "diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("model.bf16.safetensors", "bf16"),
        ("model.bf16-00001-of-00002.safetensors", "bf16"),
        ("model-00001-of-00002.fp16.safetensors", "fp16"),
        (f"{BASE}.fp16.safetensors", "fp16"),
    ],
)
def test_variants_are_recognized_by_name(name, variant):
    assert parse_variant(name) == variant


def test_weights_without_a_variant_come_first_then_bf16_and_else_there_must_be_one(tmp_path):
    assert select_variant(tmp_path) is None
    (tmp_path / "model.fp16.safetensors").touch()
    assert select_variant(tmp_path) == "fp16"
    (tmp_path / "model.fp8.safetensors").touch()
    with pytest.raises(ModelError, match="only has the variants fp16, fp8; keep one of them"):
        select_variant(tmp_path)
    (tmp_path / "model.bf16.safetensors").touch()
    assert select_variant(tmp_path) == "bf16"
    (tmp_path / "model.safetensors").touch()
    assert select_variant(tmp_path) is None


@pytest.fixture(params=["10GB", "100KB"], ids=["one file", "shards"])
def pair(request, tiny_pipelines, tmp_path):
    """Return two folders as diffusers writes them: a bfloat16 pipeline, and the same with bf16 variant files only."""
    pipeline = DiffusionPipeline.from_pretrained(tiny_pipelines("sana"), torch_dtype=torch.bfloat16)
    plain, variant = tmp_path / "plain", tmp_path / "variant"
    pipeline.save_pretrained(plain, max_shard_size=request.param)
    pipeline.save_pretrained(variant, variant="bf16", max_shard_size=request.param)
    assert all(parse_variant(file.name) == "bf16" for file in variant.rglob("*.safetensors"))
    return plain, variant


def load(folder, **options):
    return registry.load_model(folder, dtype=torch.bfloat16, device="cpu", **options)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_variant_loads_to_the_same_weights(pair, mapped):
    plain, variant = (load(folder, mapped=mapped) for folder in pair)
    for name in ("transformer", "text_encoder", "vae"):
        ours = getattr(variant.pipeline, name).state_dict()
        theirs = getattr(plain.pipeline, name).state_dict()
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert tensor.dtype == ours[key].dtype, key
            assert torch.equal(tensor, ours[key]), key
    assert variant.denoiser.dtype == torch.bfloat16


def test_its_dtype_is_known_and_its_tensors_are_read(pair):
    plain, variant = pair
    assert weights_dtype(variant / "transformer") == torch.bfloat16
    name = next(iter(load(variant).denoiser.state_dict()))
    stored = [FolderWeights(folder / "transformer").read_tensor(name) for folder in (plain, variant)]
    assert torch.equal(*stored)


def test_weights_that_are_not_loaded_change_neither_dtype_nor_fingerprint(pair):
    plain, variant = pair
    before = fingerprint_folders(plain, ["transformer"])
    wide = torch.nn.Linear(1, 1)
    from safetensors.torch import save_file

    save_file(wide.state_dict(), plain / "transformer" / f"{BASE}.fp32.safetensors")
    assert weights_dtype(plain / "transformer") == torch.bfloat16
    assert fingerprint_folders(plain, ["transformer"]) == before
    assert fingerprint_folders(variant, ["transformer"]) != before
    changed = next((variant / "transformer").glob("*.bf16*.safetensors"))
    known = fingerprint_folders(variant, ["transformer"])
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x7f")
    assert fingerprint_folders(variant, ["transformer"]) != known


def test_the_lines_that_load_it_name_the_variant(pair):
    plain, variant = pair
    assert pipeline_variant(plain) is None
    assert "variant" not in loading_lines(plain, plain, lora=False)
    shutil.rmtree(variant / "transformer")  # an export has its own transformer
    shutil.copytree(plain / "transformer", variant / "transformer")
    lines = loading_lines(variant, variant, lora=False)
    assert ', variant="bf16")' in lines
    names = {}
    exec(lines, names)
    assert type(names["pipe"].transformer).__name__ == "SanaTransformer2DModel"
