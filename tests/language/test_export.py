"""Exports of language models: transformers and peft load them without missing or unexpected tensors."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from wfm_ds.errors import ModelError
from wfm_ds.export.target import ExportTarget
from wfm_ds.language import model as language_model
from wfm_ds.language.export import LanguageTarget, export_language, loading_code
from wfm_ds.models.tiny import write_tiny_model

FAMILIES = ("qwen25vl", "qwen3vl")


class Weights:
    """The slightly changed tensors of a network in the order of an engine, without repeating shared ones."""

    def __init__(self, network, *, lora=None, frozen=()):
        self.network, self.uses_lora, self.config, self.frozen = network, lora is not None, lora, frozen

    def iter_full_tensors(self, policy):
        assert policy == "train"
        for name, parameter in self.network.named_parameters():
            if (self.uses_lora and ".default." not in name) or name in self.frozen:
                continue
            yield name.replace(".default.", "."), parameter.detach() + 0.5

    def lora_config(self):
        return self.config


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    write_tiny_model(request.param, tmp_path / "base")
    return language_model.load_language_model(str(tmp_path / "base"), torch.float32)


def exported(model, out, **options):
    target = LanguageTarget.from_network(model.network, model.path)
    source = Weights(model.network, **options)
    return export_language(target, source, out, policy="train", dtype=torch.bfloat16, is_main=True)


def loaded(folder):
    network, news = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not news["missing_keys"]
    assert not news["unexpected_keys"]
    return network


def test_a_full_export_is_a_folder_that_transformers_loads(model, tmp_path):
    frozen = model.group_parameter_names(["merger"])
    folder = exported(model, tmp_path / "out", frozen=frozen)
    again = loaded(folder)
    assert again.dtype == torch.bfloat16
    for name, parameter in model.network.named_parameters():
        wanted = parameter if name in frozen else parameter + 0.5
        assert torch.equal(again.get_parameter(name), wanted.detach().bfloat16()), name
    names = {file.name for file in folder.iterdir()}
    assert {"chat_template.jinja", "tokenizer.json", "preprocessor_config.json", "generation_config.json"} <= names
    with torch.no_grad():
        tokens = again.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
    assert tokens.shape[1] >= 4
    exported(model, tmp_path / "out", frozen=frozen)  # replaces the first export


def test_experts_are_stored_transposed_like_the_base(tmp_path):
    """Released mixture-of-experts checkpoints store transposed experts, and serving programs expect that."""
    write_tiny_model("qwen3vlmoe", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    released = {name: t.mT.contiguous() if ".experts." in name else t for name, t in load_file(file).items()}
    save_file(released, file, metadata={"format": "pt"})
    model = language_model.load_language_model(str(tmp_path / "base"), torch.float32)
    folder = exported(model, tmp_path / "out", frozen=model.group_parameter_names(["vision"]))
    written = load_file(folder / "model.safetensors")
    assert {name: t.shape for name, t in written.items()} == {name: t.shape for name, t in released.items()}
    again = loaded(folder)
    for name, parameter in model.network.named_parameters():
        if ".experts." in name:
            assert torch.equal(again.get_parameter(name), (parameter + 0.5).detach().bfloat16()), name
            assert torch.equal(written[name].mT, (parameter + 0.5).detach().bfloat16())


def test_weights_have_the_names_of_the_base(model, tmp_path):
    """Older checkpoints use other names, and serving programs may support only those."""
    file = model.path / "model.safetensors"
    older = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(older, file, metadata={"format": "pt"})
    folder = exported(model, tmp_path / "out")
    assert load_file(folder / "model.safetensors").keys() == older.keys()


def test_a_lora_is_loaded_by_peft(model, tmp_path):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=model.default_lora_targets)
    model.network.add_adapter(config, adapter_name="default")
    folder = exported(model, tmp_path / "out", lora=config)
    base = AutoModelForImageTextToText.from_pretrained(model.path)
    tuned = peft.PeftModel.from_pretrained(base, folder)
    given = {n.replace(".default.", "."): p for n, p in tuned.named_parameters() if "lora_" in n}
    wanted = dict(Weights(model.network, lora=config).iter_full_tensors("train"))
    assert given.keys() == {f"base_model.model.{name}" for name in wanted}
    assert all(torch.equal(given[f"base_model.model.{name}"], tensor) for name, tensor in wanted.items())
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model.path)
    assert str(model.path) in loading_code(model.path, folder, lora=True)


def test_non_finite_weights_are_not_exported(model, tmp_path):
    with torch.no_grad():
        next(model.network.parameters())[0, 0] = torch.nan
    with pytest.raises(ModelError, match="contains NaN or infinity"):
        exported(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_a_language_model_cannot_be_converted(model):
    note = LanguageTarget.from_network(model.network, model.path).to_json()
    with pytest.raises(ModelError, match=r"a checkpoint of the language model .* cannot be converted"):
        ExportTarget.from_json(note)
