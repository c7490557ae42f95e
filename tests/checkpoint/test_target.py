import json
import shutil

import pytest
import torch

from each_case import check_each
from wfm_ds.errors import ModelError
from wfm_ds.export.target import ExportTarget
from wfm_ds.models import registry


@check_each("family", ["sd3", "wan21", "wan22", "sana", "cosmos25"])
def test_an_export_target_describes_its_model_without_loading_it(family, tiny_pipelines):
    options = {"guardrail": "off"} if family == "cosmos25" else {}
    model = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu", **options)
    target = ExportTarget.from_model(model)
    assert ExportTarget.from_json(json.loads(json.dumps(target.to_json()))) == target
    for part in target.parts:
        live = getattr(model.pipeline, part)
        assert target.tensor_shapes(part) == {name: tensor.shape for name, tensor in live.state_dict().items()}
        stored = target.base_weights(part)
        for name, tensor in live.state_dict().items():
            assert torch.equal(stored.read_tensor(name).float(), tensor.float())


def test_missing_weights_and_components_of_the_base_are_named(tiny_pipelines, tmp_path):
    target = ExportTarget(tiny_pipelines("sd3"), ("transformer",))
    stored = target.base_weights("transformer")
    with pytest.raises(ModelError, match=r"nothing\.weight cannot be read from"):
        stored.read_tensor("nothing.weight")
    with pytest.raises(ModelError, match="has no transformer_2; name the pipeline"):
        target.tensor_shapes("transformer_2")
    (tmp_path / "transformer").mkdir()
    index = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    for text in ("{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(ModelError, match=r"index\.json"):
            ExportTarget(tmp_path, ("transformer",)).base_weights("transformer")


def test_a_network_may_have_a_class_of_another_library(tiny_pipelines, tmp_path, monkeypatch):
    base = tmp_path / "base"
    shutil.copytree(tiny_pipelines("sd3"), base)
    module = "from diffusers import SD3Transformer2DModel\n\nclass MyNetwork(SD3Transformer2DModel):\n    pass\n"
    (tmp_path / "my_networks.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    index = json.loads((base / "model_index.json").read_text())
    for name, message in (("MyNetwork", None), ("Missing", r"class my_networks\.Missing: module .* has no attribute")):
        (base / "model_index.json").write_text(json.dumps(index | {"transformer": ["my_networks", name]}))
        target = ExportTarget(base, ("transformer",))
        if message is None:
            expected = ExportTarget(tiny_pipelines("sd3"), ("transformer",)).tensor_shapes("transformer")
            assert type(target.meta_network("transformer")).__name__ == name
            assert target.tensor_shapes("transformer") == expected
        else:
            with pytest.raises(ModelError, match=message):
                target.meta_network("transformer")
