"""LoRA folders written by stock diffusers are loaded onto a model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from each_case import check_each
from wfm_ds.checkpoint.adapter_loading import find_adapter_file, load_adapter
from wfm_ds.errors import ModelError
from wfm_ds.export import lora_file
from wfm_ds.models import registry


def loaded(folder):
    return registry.load_model(folder, dtype=torch.float32, device="cpu")


def with_adapter(folder):
    """Return a model with a different LoRA on each expert; alpha and rank differ."""
    model = loaded(folder)
    config = LoraConfig(r=4, lora_alpha=9.0, target_modules=list(model.default_lora_targets))
    generator = torch.Generator().manual_seed(2)
    for part in model.denoiser_components:
        network = getattr(model.pipeline, part)
        network.add_adapter(config, adapter_name="default")
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if "lora_B" in name:
                    weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def adapted(tiny_pipelines):
    return with_adapter(tiny_pipelines("sd3"))


def saved(model, folder, *, metadata=True):
    for part, name in (("transformer", "model.safetensors"), ("transformer_2", "model_2.safetensors")):
        if part in model.denoiser_components:
            network = getattr(model.pipeline, part)
            type(model.pipeline).save_lora_weights(
                folder,
                transformer_lora_layers=get_peft_model_state_dict(network, adapter_name="default"),
                weight_name=name,
                transformer_lora_adapter_metadata=network.peft_config["default"].to_dict() if metadata else None,
            )
    return folder


def velocity(model, sigma):
    noise = torch.randn(2, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    texts = model.encode_text(["a red circle", "a cat"])
    with torch.no_grad():
        return model.denoise(noise, torch.full((2,), sigma), texts)


@pytest.mark.parametrize("family", ["sd3", "wan22"])
def test_a_loaded_adapter_computes_the_trained_velocity(family, tiny_pipelines, tmp_path):
    trained, fresh = with_adapter(tiny_pipelines(family)), loaded(tiny_pipelines(family))
    before = {sigma: velocity(fresh, sigma) for sigma in (1.0, 0.4)}  # noise levels of both experts, if there are two
    load_adapter(fresh, saved(trained, tmp_path / "lora"))
    for sigma, without in before.items():
        assert torch.equal(velocity(fresh, sigma), velocity(trained, sigma))
        assert (velocity(fresh, sigma) - without).abs().max() > 1e-2
    scales = {layer.scaling["default"] for layer in fresh.denoiser.modules() if hasattr(layer, "scaling")}
    assert scales == {9.0 / 4}


def test_adapter_of_one_expert_is_not_enough_for_two(tiny_pipelines, tmp_path):
    folder = saved(with_adapter(tiny_pipelines("wan22")), tmp_path / "lora")
    (folder / "model_2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lora has no model_2.safetensors"):
        load_adapter(loaded(tiny_pipelines("wan22")), folder)


def test_a_file_without_alpha_is_refused(adapted, tmp_path):
    folder = saved(adapted, tmp_path / "lora", metadata=False)
    with pytest.raises(ModelError, match="does not contain its alpha"):
        load_adapter(loaded(adapted.path), folder)


@check_each("edit", ["other layer", "other rank", "no prefix"])
def test_adapter_of_another_model_is_refused_and_not_loaded_in_part(adapted, tmp_path, edit):
    folder = saved(adapted, tmp_path / "lora")
    path = folder / "model.safetensors"
    tensors, metadata = load_file(path), header(path)
    name = next(iter(tensors))
    if edit == "other layer":
        tensors[name.replace("transformer_blocks.0", "transformer_blocks.77")] = tensors.pop(name)
    elif edit == "other rank":
        tensors[name] = tensors[name][..., :-1].contiguous()
    else:
        tensors = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ModelError, match="does not fit"):
        load_adapter(loaded(adapted.path), folder)


def header(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_damaged_file_is_refused(adapted, tmp_path):
    path = saved(adapted, tmp_path / "lora") / "model.safetensors"
    whole_layers = path.with_name("modules_to_save.safetensors")
    whole_layers.write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"modules_to_save\.safetensors cannot be read"):
        load_adapter(loaded(adapted.path), path.parent)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"/model\.safetensors cannot be read"):
        load_adapter(loaded(adapted.path), path.parent)


def test_fully_trained_layers_are_loaded_and_read_only_once(adapted, tmp_path, monkeypatch):
    folder, fresh, opened = saved(adapted, tmp_path / "lora"), loaded(adapted.path), []
    trained = torch.ones_like(fresh.denoiser.proj_out.weight)
    save_file({"proj_out.weight": trained}, folder / "modules_to_save.safetensors")
    monkeypatch.setattr(lora_file, "safe_open", lambda path, *rest: opened.append(path.name) or safe_open(path, *rest))
    load_adapter(fresh, folder)
    assert torch.equal(fresh.denoiser.proj_out.weight, trained)
    assert opened.count("modules_to_save.safetensors") == 1


def test_the_error_for_a_parent_folder_names_the_adapter_folder(adapted, tmp_path):
    saved(adapted, tmp_path / "step_3" / "lora")
    assert find_adapter_file(tmp_path / "step_3" / "lora").is_file()
    with pytest.raises(ModelError, match=r"step_3 has no model.safetensors; use .*step_3/lora$"):
        find_adapter_file(tmp_path / "step_3")
    with pytest.raises(ModelError, match=r"; use safetensors/step_N/lora of a LoRA run$"):
        find_adapter_file(tmp_path)
