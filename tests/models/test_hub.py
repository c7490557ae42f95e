"""Pipelines by owner/name: downloads from a Hub server on this machine, and one error message for each failure."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from commands import wfm_command
from each_case import check_each
from hub_server import Repo, files_of, hub_server, use
from wfm_ds.cli.main import main as wfm
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.assets import hub
from wfm_ds.models.assets.meta_loading import load_on_meta_device
from wfm_ds.models.assets.released_repos import RELEASED_REPOS
from wfm_ds.recipe import file as recipe_file
from wfm_ds.storage.filesystem import is_repo_id

generate = wfm_command("generate")
RECIPES = Path(__file__).parent.parent.parent / "recipes"
NAME = "stabilityai/stable-diffusion-3.5-medium"
EXTRA = {
    "README.md": b"# card",
    "sd3.5_medium.safetensors": b"a single file",
    "transformer/diffusion_pytorch_model.bin": b"a pickle",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"a variant",
    "text_encoders/t5xxl.safetensors": b"for another program",
    "call.json": b"{}",
}


@pytest.fixture(scope="module")
def server():
    with hub_server() as running:
        yield running


@pytest.fixture
def site(server, tmp_path, tiny_pipelines, monkeypatch):
    """Return a Hub server with one pipeline; the local cache is empty."""
    server.repos = {NAME: Repo(files_of(tiny_pipelines("sd3")) | EXTRA, branches=("main", "other/branch"))}
    server.sent.clear()
    use(monkeypatch, url=server.url, cache=tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return server


def offline(monkeypatch, tmp_path):
    use(monkeypatch, url="http://127.0.0.1:9", cache=tmp_path / "cache", offline=True)


def refusal(path=NAME, revision=None):
    with pytest.raises(ModelError) as raised:
        registry.resolve_pipeline(path, None, revision)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.slow
def test_the_files_of_the_parts_are_fetched_once_and_no_others(
    site, tmp_path, monkeypatch, tiny_pipelines, caplog, capfd
):
    with caplog.at_level(logging.INFO):
        folder = registry.resolve_pipeline(NAME)
    assert folder.name == site.repos[NAME].commit
    assert files_of(folder) == files_of(tiny_pipelines("sd3")) | {"call.json": b"{}"}
    assert site.sent[0] == "model_index.json"
    assert len(set(site.sent)) == len(site.sent) == len(set(files_of(folder).values()))  # equal files: one download
    assert re.search(rf"model {NAME}: 0\.0 GB, downloading \d+ of \d+ files", caplog.text)
    site.sent.clear()
    caplog.clear()
    assert registry.resolve_pipeline(NAME) == folder
    assert not site.sent
    assert "downloading" not in caplog.text
    assert "%|" not in capfd.readouterr().err  # no progress bar without a terminal
    assert hub.snapshot_origin(folder) == (NAME, folder.name)
    assert hub.display_name(folder) == f"{NAME} @ {folder.name[:7]}"
    num_asked = site.asked
    model = registry.load_model(NAME, revision=folder.name, dtype=torch.float32, device="cpu")
    assert site.asked == num_asked  # a cached commit loads without the network
    offline(monkeypatch, tmp_path)
    assert registry.resolve_pipeline(NAME) == registry.resolve_pipeline(NAME, None, folder.name) == model.path == folder


def test_a_branch_with_a_slash_is_a_revision(site):
    assert registry.resolve_pipeline(NAME, None, "other/branch").name == site.repos[NAME].commit
    message = refusal(revision="v9")
    assert message == f"{NAME} has no branch, tag or commit v9: change model.revision"


def test_generate_uses_a_revision_of_the_hub(site, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    words = f"--model {NAME} --prompts prompts.txt --out out --steps 2 --height 32 --width 32".split()
    assert generate([*words, "--revision", "v9"]) == 2
    assert "no branch, tag or commit v9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert generate([*words, "--revision", "other/branch"]) == 0
    assert (tmp_path / "out" / "0000.png").is_file()


def test_an_unsupported_class_is_refused_before_its_weights_are_fetched(site):
    site.repos[NAME].files["model_index.json"] = json.dumps({"_class_name": "FluxPipeline"}).encode()
    assert "pipelines of class FluxPipeline are not supported" in refusal()
    assert site.sent == ["model_index.json"]


def test_an_interrupted_download_is_completed(site, tmp_path, monkeypatch):
    folder = registry.resolve_pipeline(NAME)
    lost = [folder / "vae/config.json", folder / "transformer/diffusion_pytorch_model.safetensors"]
    for path in lost:
        path.unlink()
    site.sent.clear()
    offline(monkeypatch, tmp_path)
    assert f"hf download {NAME} --revision {folder.name}" in refusal()
    use(monkeypatch, url=site.url, cache=tmp_path / "cache")
    assert registry.resolve_pipeline(NAME) == folder
    assert all(path.is_file() for path in lost)
    shutil.rmtree(folder / "vae")
    shutil.rmtree(folder.parent.parent / "trees")  # as in a cache that another program has filled
    offline(monkeypatch, tmp_path)
    assert "the Hub cannot be reached" in refusal()


def test_a_size_is_estimated_without_the_weights(site):
    model = load_on_meta_device(NAME, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.unwrapped_denoiser.parameters())
    assert not [name for name in site.sent if name.endswith(".safetensors")]


def test_a_repository_is_inspected_without_downloading_weights(site, capsys):
    assert wfm(["models", NAME]) == 0
    told = capsys.readouterr().out
    assert "StableDiffusion3Pipeline" in told
    assert not [name for name in site.sent if name.endswith(".safetensors")]
    assert wfm(["models", NAME, "--revision", "other/branch", "--download"]) == 0
    assert "transformer" in capsys.readouterr().out
    assert "transformer/diffusion_pytorch_model.safetensors" in site.sent


def test_a_part_that_has_nothing_but_a_variant_is_fetched_as_that(site):
    files = site.repos[NAME].files
    weights = files.pop("vae/diffusion_pytorch_model.safetensors")
    files |= {"vae/diffusion_pytorch_model.bf16.safetensors": weights}
    folder = registry.resolve_pipeline(NAME)
    assert (folder / "vae/diffusion_pytorch_model.bf16.safetensors").is_file()
    assert not (folder / "transformer/diffusion_pytorch_model.fp16.safetensors").exists()


SHARD = "m-00001-of-00002.safetensors"
LISTINGS = [
    (
        [SHARD, "m.safetensors.index.json", "m.fp16.safetensors", "m.safetensors.index.fp16.json", "config.json"],
        [SHARD, "m.safetensors.index.json", "config.json"],
    ),
    (["m.safetensors", "m.fp16-00001-of-00002.safetensors", "m.msgpack"], ["m.safetensors"]),
    (["m.bf16.safetensors", "m.safetensors.index.bf16.json", "spiece.model"], ...),
    (["vocab.json", "merges.txt", "template.jinja", "notes.md"], ["vocab.json", "merges.txt", "template.jinja"]),
]


@check_each(("files", "kept"), LISTINGS)
def test_plain_weights_are_preferred_to_a_variant(files, kept):
    listed = [f"part/{name}" for name in files]
    assert hub.select_files(listed, ["part"]) == (listed if kept is ... else [f"part/{name}" for name in kept])
    assert hub.select_files(listed, ["other"]) == []


def test_not_in_the_cache_and_no_network(site, tmp_path, monkeypatch):
    expected = (
        f"{NAME} is not in the Hub cache (and not a local folder), and the Hub cannot be reached; on a machine with a "
        f'network: hf download {NAME} --revision v1 --exclude "*.bin"'
    )
    offline(monkeypatch, tmp_path)
    assert refusal(revision="v1") == expected


@pytest.mark.slow  # huggingface_hub retries for 20 s
def test_an_unreachable_hub_is_like_no_network(tmp_path, monkeypatch):
    use(monkeypatch, url="http://127.0.0.1:9", cache=tmp_path / "cache")  # nothing listens on this port
    assert f"the Hub cannot be reached; on a machine with a network: hf download {NAME} --exclude" in refusal()


def test_private_and_gated_repositories_are_refused(site):
    message = refusal("stabilityai/stable-diffusion-3.5-medum")
    assert message.startswith("stabilityai/stable-diffusion-3.5-medum is neither a local folder nor a Hub repository")
    assert message.endswith(f"hf auth login; for the released model: model.path={NAME}")
    site.repos[NAME].refusal = (403, "GatedRepo")
    assert refusal() == (
        f"{NAME} requires that you accept its licence: open https://huggingface.co/{NAME}, accept it, then run hf auth "
        "login (or set HF_TOKEN)"
    )
    site.repos[NAME].refusal = (403, "Disabled")
    assert "cannot be downloaded from the Hub" in refusal()


@check_each(
    ("name", "files", "message"),
    [
        (
            "nvidia/Cosmos-Predict2-9B",
            {"base/post-trained/81edfebe_ema_bf16.pt": b""},
            "nvidia/Cosmos-Predict2-9B contains original Cosmos checkpoints; convert one: python "
            "convert_cosmos_to_diffusers.py --transformer_type Cosmos-2.5-Predict-Base-2B --transformer_ckpt_path FILE "
            "--vae_type wan2.1 --output_path OUT --save_pipeline (a script of diffusers)",
        ),
        (
            "nvidia/Cosmos-Predict2.5-2B",
            {"base/post-trained/81edfebe_ema_bf16.pt": b""},
            "the diffusers pipeline of nvidia/Cosmos-Predict2.5-2B is in another branch: set model.revision: "
            "diffusers/base/post-trained",
        ),
        (
            "Wan-AI/Wan2.1-T2V-1.3B",
            {"diffusion_pytorch_model.safetensors": b""},
            "Wan-AI/Wan2.1-T2V-1.3B is not in diffusers' format; Wan-AI/Wan2.1-T2V-1.3B-Diffusers is",
        ),
        (
            "me/vlm",
            {"config.json": b"{}", "preprocessor_config.json": b"{}"},
            "me/vlm is a vision-language model: use data.kind: llava, as in the recipe reason_llava_sft "
            "(docs/reasoner.md)",
        ),
        ("me/mine", {"x": b""}, "me/mine has no model_index.json: choose a repository in diffusers' format"),
    ],
)
def test_the_error_for_a_repository_in_another_format_names_the_fix(site, name, files, message):
    site.repos[name] = Repo(files)
    assert refusal(name) == message


@check_each("name", ["../x.json", "/tmp/x.json", "vae/../../x.json", "..\\x.json"])
def test_a_file_name_that_leaves_the_cache_is_refused(site, name, tmp_path):
    site.repos[NAME].files[name] = b"{}"
    assert refusal().startswith(f"{NAME} cannot be downloaded: Invalid filename")
    assert not list(tmp_path.rglob("x.json"))


def test_a_full_disk_is_found_before_anything_is_fetched(site, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    assert re.search(r"needs 0\.0 GB in .*cache, but 0\.0 GB are free", refusal())
    assert site.sent == ["model_index.json"]


def test_a_local_file_or_folder_has_priority_over_a_hub_id(tmp_path, monkeypatch, tiny_pipelines):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.jsonl").touch()
    assert not is_repo_id("data/metadata.jsonl")
    shutil.copytree(tiny_pipelines("sd3"), tmp_path / NAME)
    assert registry.resolve_pipeline(NAME) == Path(NAME)
    assert refusal(NAME, "main") == (
        f"model.revision main needs a repository of the Hub, but {NAME} is not one: remove it"
    )
    for path in ("models/stable-diffusion-3.5-medium", "./a/b", "~/a", "a/b/c", "/a/b", "a", "tiny:sd3"):
        assert not is_repo_id(path)
    assert refusal("models/stable-diffusion-3.5-medium") == (
        "models/stable-diffusion-3.5-medium does not exist; model.path must be a local diffusers pipeline folder, "
        f"owner/name on the Hub, or tiny:FAMILY; for the released model: model.path={NAME}"
    )
    assert refusal("models/Cosmos-Predict2.5-2B").endswith(
        "model.path=nvidia/Cosmos-Predict2.5-2B model.revision=diffusers/base/post-trained"
    )


def test_shipped_recipes_name_released_repositories_and_their_branch():
    models = [recipe_file.load_recipe(path).model for path in RECIPES.glob("*.yaml")]
    names = {(model.path, model.revision) for model in models if not model.path.startswith("Qwen/Qwen2.5-VL")}
    # Only the original checkpoints of these models are published.
    original = {("models/Cosmos-Predict2.5-14B", None), ("models/Cosmos-Predict2.5-2B-action-cond", None)}
    for path, revision in names - original:
        assert path in RELEASED_REPOS or path == "Qwen/Qwen3-VL-2B-Instruct"
        branch = RELEASED_REPOS.get(path)
        assert revision == branch if branch is not None else revision is None or hub.is_commit(revision)
