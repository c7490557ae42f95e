"""Cosmos-Predict2.5 with actions: the network against NVIDIA's, converted checkpoints, and rejected inputs.

test_families.py has the tests that all families share.
"""

import io
import json
import re
import shutil

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from safetensors.torch import load_file

from commands import wfm_command
from families import CASES, PROMPTS, change_json, record_calls, robot_inputs
from reference import cosmos_actions as reference
from wfm_ds.errors import ModelError
from wfm_ds.export.cosmos_actions import LAYER_NAMES
from wfm_ds.models import registry
from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.cosmos25 import Cosmos25Actions, provide_torchvision_resize
from wfm_ds.models.cosmos25_action_network import CosmosActionTransformer3DModel
from wfm_ds.models.tiny.sizes import COSMOS25

convert = wfm_command("convert")

pytestmark = pytest.mark.slow

SIZE = (32, 48, 9)


@pytest.fixture(scope="module")
def base(tiny_pipelines, tmp_path_factory):
    """Return the folder of a Cosmos-Predict2.5 pipeline whose network has the size of the reference."""
    folder = tmp_path_factory.mktemp("base") / "cosmos25"
    shutil.copytree(tiny_pipelines("cosmos25"), folder)
    CosmosTransformer3DModel(**COSMOS25 | reference.CONFIG).save_pretrained(folder / "transformer")
    return folder


def write_checkpoint(file, changes=(), extra=None):
    """Write NVIDIA's checkpoint with other entries than weights. changes: weights, or None to omit one."""
    tensors = {name: tensor.float() for name, tensor in reference.weights().items()} | dict(changes)
    states = {f"net.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    other = {"accum_iteration": torch.ones(1), "t_embedding_norm._extra_state": io.BytesIO(b"te"), **(extra or {})}
    torch.save(states | {f"net.{name}": value for name, value in other.items()}, file)
    return file


def run_convert(capsys, *words):
    code = convert(words)
    printed = capsys.readouterr()
    return code, printed.err if code else printed.out


@pytest.fixture(scope="module")
def converted(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    checkpoint = write_checkpoint(folder / "action_ema_bf16.pt")
    words = [checkpoint, folder / "out", "--base", base, "--dtype", "float32"]
    assert convert(words) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def network(converted):
    provide_torchvision_resize()
    return CosmosActionTransformer3DModel.from_pretrained(converted / "transformer").double().eval()


def run_network(network, **changes):
    given = reference.inputs() | changes
    with torch.no_grad():
        return network(
            hidden_states=given["latents"],
            timestep=given["sigma"],
            encoder_hidden_states=given["text"],
            condition_mask=given["mask"],
            padding_mask=torch.zeros(1, 1, *reference.SIZE, dtype=torch.float64),
            actions=given["actions"],
            return_dict=False,
        )[0]


# NVIDIA's network


def test_a_converted_checkpoint_gives_the_results_of_nvidias_code(network):
    got = reference.sample(run_network(network))
    assert got == pytest.approx(reference.RESULTS, rel=0, abs=5e-6)  # both compute the rotary tables in float32


def test_time_embeddings_with_actions_equal_the_formulas(network):
    given, results = reference.inputs(), []
    with network.time_embed.register_forward_hook(lambda _, __, output: results.append(output)):
        run_network(network)
    mask = given["mask"][:, 0, :, 0, 0]
    want = reference.time_embeddings(reference.weights(), given["sigma"], given["actions"], mask)
    for one, other in zip(results[0], want, strict=True):
        torch.testing.assert_close(one, other.flatten(0, 1), rtol=0, atol=2e-6)


def test_every_layer_has_its_name_in_nvidias_code(network):
    layers = {name.rpartition(".")[0] for name in network.state_dict()}
    originals = {name: LAYER_NAMES.find_original(name)[0] for name in layers}
    assert set(originals.values()) == {name.rpartition(".")[0] for name in reference.shapes()}
    assert originals["transformer_blocks.1.norm2.linear_1"] == "blocks.1.adaln_modulation_cross_attn.1"
    assert originals["transformer_blocks.0.attn2.norm_k"] == "blocks.0.cross_attn.k_norm"


def test_without_actions_the_network_is_that_of_diffusers(network):
    states = {name: tensor for name, tensor in network.state_dict().items() if ".action_" not in name}
    config = {name: value for name, value in network.config.items() if not name.startswith(("_", "action_"))}
    stock = CosmosTransformer3DModel(**config).double().eval()
    stock.load_state_dict(states)
    want = stock(
        **{"hidden_states": reference.inputs()["latents"], "timestep": reference.inputs()["sigma"]},
        encoder_hidden_states=reference.inputs()["text"],
        condition_mask=reference.inputs()["mask"],
        padding_mask=torch.zeros(1, 1, *reference.SIZE, dtype=torch.float64),
        return_dict=False,
    )[0]
    torch.testing.assert_close(run_network(network, actions=None), want, rtol=0, atol=0)


def test_actions_of_conditioning_frames_do_not_matter(network):
    actions, want = reference.inputs()["actions"], run_network(network)
    for sample, frame, matters in ((0, 1, True), (1, 1, False), (1, 2, True)):
        changed = actions.clone()
        changed[sample, 4 * frame - 1] += 1  # the last of the four actions of this frame
        assert bool((run_network(network, actions=changed) - want)[sample].abs().max() > 1e-3) == matters


@pytest.mark.parametrize("shape", [(2, 8, 7), (2, 12, 6), (1, 12, 7), (2, 12)])
def test_actions_of_another_shape_are_refused(network, shape):
    with pytest.raises(ValueError, match=r"actions must be \[2, 12, 7\] with a condition_mask, got"):
        run_network(network, actions=torch.zeros(shape, dtype=torch.float64))


# Converted folders


def test_a_converted_folder_has_the_base_and_is_loaded_as_its_own_family(converted, base):
    assert registry.find_family(converted) is Cosmos25Actions
    config = json.loads((converted / "transformer" / "config.json").read_text())
    assert (config["action_dim"], config["action_hidden_size"]) == (reference.ACTIONS, reference.ACTION_HIDDEN)
    assert (converted / "vae" / "config.json").read_bytes() == (base / "vae" / "config.json").read_bytes()
    model = registry.load_model(converted, dtype=torch.float32, device="cpu", guardrail="off")
    assert model.input_shapes(model.latent_shape(*SIZE)) == {"actions": (8, 7)}


def test_the_printed_lines_load_the_folder_in_diffusers(base, tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path / "model.pt")
    code, printed = run_convert(capsys, checkpoint, tmp_path / "out", "--base", base)
    assert code == 0
    lines = printed.partition("\n")[2]
    assert "from wfm_ds.models.cosmos25_action_network import CosmosActionPipeline" in lines
    names = {"checker": NoGuardrail()}
    exec(lines.replace('out")', 'out", safety_checker=checker)'), names)
    assert type(names["pipe"].transformer) is CosmosActionTransformer3DModel


def test_weights_are_bfloat16_unless_a_dtype_is_given(base, tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path / "model.pt")
    assert run_convert(capsys, checkpoint, tmp_path / "out", "--base", base)[0] == 0
    stored = load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    want = reference.weights()["action_embedder_B_D.fc2.weight"]
    torch.testing.assert_close(stored["time_embed.action_embedder.2.weight"], want.float().bfloat16(), rtol=0, atol=0)


class Payload:
    """An object whose unpickling would call print."""

    def __reduce__(self):
        return print, ("executed",)


NORM = "blocks.0.self_attn.k_norm.weight"


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({NORM: None}, None, rf"has no {NORM}"),
        ({NORM: torch.ones(23)}, None, rf"{NORM} is \[23\], but the base pipeline needs \[24\]"),
        ({"blocks.2.mlp.layer1.weight": torch.ones(2, 2)}, None, r"unexpected tensor blocks\.2\.mlp\.layer1\.weight"),
        ({"action_embedder_B_D.fc1.weight": None}, None, r"has no action_embedder_B_D\.fc1\.weight: only checkpoints"),
        ({"action_embedder_B_D.fc1.weight": torch.ones(40, 27)}, None, "27 columns, not a multiple of 4"),
        ({}, {"payload": Payload()}, r"cannot be read \("),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(base, tmp_path, capsys, changes, extra, message):
    checkpoint = write_checkpoint(tmp_path / "model.pt", changes, extra)
    code, printed = run_convert(capsys, checkpoint, tmp_path / "out", "--base", base)
    assert code == 2
    assert re.search(message, printed)
    assert "executed" not in printed
    assert not (tmp_path / "out").exists()


def test_other_arguments_are_refused(base, tiny_pipelines, tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path / "model.pt")
    for words, message in (
        ([], "set --base"),
        (["--base", tiny_pipelines("sd3")], "is a StableDiffusion3Pipeline; use a folder of Cosmos2_5"),
        (["--base", base, "--policy", "ema"], "has a single policy"),
        (["--base", base, "--merge"], "omit --merge, --layout"),
        (["--base", base, "--layout", "peft"], "omit --merge, --layout"),
    ):
        code, printed = run_convert(capsys, checkpoint, tmp_path / "out", *words)
        assert (code, message in printed) == (2, True), printed


def test_a_checkpoint_as_the_model_path_prints_the_command(tmp_path):
    write_checkpoint(file := tmp_path / "action-cond_ema_bf16.pt")
    with pytest.raises(ModelError, match=rf"convert it: wfm convert {file} OUT --base"):
        registry.resolve_pipeline(file)


def test_untrained_action_layers_are_added_to_a_pipeline(base, tmp_path, capsys):
    words = (base, tmp_path / "out", "--action-dim", 5, "--dtype", "float32")
    assert run_convert(capsys, *words)[0] == 0
    model = registry.load_model(tmp_path / "out", dtype=torch.float32, device="cpu", guardrail="off")
    assert model.config.action_dim == 5
    tensors = model.unwrapped_denoiser.state_dict()
    stock = CosmosTransformer3DModel.from_pretrained(base / "transformer").state_dict()
    for name, tensor in stock.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    new = {name: tensor for name, tensor in tensors.items() if name not in stock}
    assert len(new) == 8
    assert new["time_embed.action_embedder.0.weight"].shape == (4 * reference.WIDTH, 20)
    assert all(0 < tensor.abs().max() <= 1 / 20**0.5 for tensor in new.values())  # torch's initial values
    for more, message in ((["--base", base], "omit --base"), (["--action-dim", 0], "must be at least 1")):
        code, printed = run_convert(capsys, *words, *more)
        assert (code, message in printed) == (2, True), printed


# The family


@pytest.fixture(scope="module")
def model(load):
    return load("cosmos25_actions")


def denoise_arguments(model, counts):
    generator = torch.Generator().manual_seed(3)
    noise, latents = (torch.randn((2, *model.latent_shape(*SIZE)), generator=generator) for _ in range(2))
    conditioning = model.encode_text(PROMPTS) | model.encode_inputs(robot_inputs(*SIZE), SIZE[2], SIZE[:2])
    return noise, torch.tensor([0.9, 0.12345]), add_clean_frames(conditioning, latents, torch.tensor(counts))


def test_all_frames_have_the_same_timestep(model):
    with record_calls(model.denoiser) as calls, torch.no_grad():
        model.denoise(*denoise_arguments(model, [1, 2]))
    (call,) = calls
    torch.testing.assert_close(call["timestep"].flatten(1), torch.tensor([[0.9] * 3, [0.12345] * 3]), rtol=0, atol=0)
    assert call["condition_mask"].mean((1, 3, 4)).tolist() == [[1, 0, 0], [1, 1, 0]]


def test_nothing_is_denoised_without_actions(model):
    noise, sigma, conditioning = denoise_arguments(model, [1, 1])
    del conditioning["actions"]
    with pytest.raises(ValueError, match="conditioning lacks actions, which this network needs"):
        model.denoise(noise, sigma, conditioning)


def test_a_folder_of_another_package_is_not_taken_for_this_family(tiny_pipelines, tmp_path):
    shutil.copytree(tiny_pipelines("cosmos25_actions"), folder := tmp_path / "model")
    change_json(folder / "model_index.json", _class_name="SomeActionPipeline")
    with pytest.raises(ModelError, match="SomeActionPipeline are not supported"):
        registry.load_model(folder, dtype=torch.float32, device="cpu", **CASES["cosmos25_actions"].load_options)
