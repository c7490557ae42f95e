"""Language models by owner/name: downloads from a Hub server on this machine, and the errors without a server."""

import shutil

import pytest
import torch

from hub_server import Repo, files_of, hub_server, use
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.errors import ModelError
from wfm_ds.language import model as language_model
from wfm_ds.models.assets import language_folders
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.recipe import file as recipe_file
from wfm_ds.runs.model_revision import pin_commit

pytestmark = pytest.mark.slow

NAME = "Qwen/Qwen3-VL-2B-Instruct"
EXTRA = {"README.md": b"# card", "original/consolidated.safetensors": b"for another program", "model.bin": b"a pickle"}


@pytest.fixture(scope="module")
def server():
    with hub_server() as running:
        yield running


def test_a_model_is_fetched_once_and_the_offline_error_says_how(server, root, tmp_path, monkeypatch):
    tiny = files_of(get_tiny_folder("qwen3vl"))
    server.repos = {NAME: Repo(tiny | EXTRA, branches=("main",))}
    use(monkeypatch, url=server.url, cache=tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write_squares(tmp_path / "squares")
    places = [f"data.path={tmp_path}/squares/annotations.json", f"run.output_dir={tmp_path / 'run'}"]
    recipe = recipe_file.load_recipe(
        root / "tests" / "recipes" / "reason_llava_sft.yaml", [*places, f"model.path={NAME}"]
    )
    assert pin_commit(recipe).model.revision == server.repos[NAME].commit
    assert server.sent == ["config.json"]  # pinning the commit downloads nothing else
    folder = language_folders.download_language_model(NAME)
    assert files_of(folder) == tiny
    server.sent.clear()
    use(monkeypatch, url="http://127.0.0.1:9", cache=tmp_path / "cache", offline=True)
    assert language_model.load_language_model(NAME, torch.float32).path == folder
    assert not server.sent
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelError, match=rf'on a machine with a network: hf download {NAME} --exclude "\*\.bin"$'):
        language_folders.download_language_model(NAME)


def test_a_revision_needs_a_hub_model():
    with pytest.raises(ModelError, match=r"model\.revision main needs a repository of the Hub"):
        language_folders.locate_language_model("tiny:qwen25vl", "main")
    with pytest.raises(ModelError, match=r"none has no config\.json"):
        language_folders.locate_language_model("none")
