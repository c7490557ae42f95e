"""Commit of a model on the Hugging Face Hub: a new run uses the branch's commit, a resumed run its recorded one."""

import pytest
import torch

from hub_server import Repo, files_of, hub_server, use
from wfm_ds.distributed.world import World
from wfm_ds.errors import ModelError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.runs.model_revision import agree_on_commit, fetch_model, pin_commit
from wfm_ds.runs.output_checks import require_separate_inputs

NAME = "somebody/tiny-sd3"
OLD = "ab" * 20
WORLD = World(0, 1, 0, torch.device("cpu"), None)


@pytest.fixture
def site(tmp_path, tiny_pipelines, monkeypatch):
    with hub_server() as server:
        server.repos[NAME] = Repo(files_of(tiny_pipelines("sd3")), branches=("main", "v2"))
        use(monkeypatch, url=server.url, cache=tmp_path / "cache")
        yield server


def recipe(root, tmp_path, *words):
    path = root / "tests" / "recipes" / "sd3_sft.yaml"
    return recipe_file.load_recipe(path, [f"model.path={NAME}", f"run.output_dir={tmp_path / 'out'}", *words])


def leave_run(folder, of):
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_file.dump_recipe(of))


def test_a_new_run_uses_the_current_commit_of_the_branch(site, root, tmp_path):
    commit = site.repos[NAME].commit
    for words in ([], ["model.revision=v2"], [f"model.revision={commit}"]):
        found = pin_commit(recipe(root, tmp_path, *words))
        assert found.model.revision == commit
        assert recipe_file.dump_recipe(found).count(commit) == 1
        assert agree_on_commit(recipe(root, tmp_path, *words), WORLD, overwrite=False) == found
    assert site.sent == ["model_index.json"]
    fetch_model(found, WORLD)
    assert "transformer/diffusion_pytorch_model.safetensors" in site.sent
    with pytest.raises(ModelError, match="no branch, tag or commit v3"):
        pin_commit(recipe(root, tmp_path, "model.revision=v3"))


def test_a_resumed_run_uses_its_recorded_commit(site, root, tmp_path):
    leave_run(tmp_path / "out", recipe(root, tmp_path, f"model.revision={OLD}"))
    assert pin_commit(recipe(root, tmp_path)).model.revision == OLD
    assert pin_commit(recipe(root, tmp_path, "model.revision=v2")).model.revision == OLD
    assert site.asked == 0
    new = recipe(root, tmp_path, f"run.output_dir={tmp_path / 'other'}", f"run.resume={tmp_path / 'out'}")
    assert pin_commit(new).model.revision == OLD
    assert pin_commit(recipe(root, tmp_path), overwrite=True).model.revision == site.repos[NAME].commit
    assert pin_commit(recipe(root, tmp_path, f"model.revision={'cd' * 20}")).model.revision == "cd" * 20


def test_the_commit_of_a_run_of_another_model_is_not_used(site, root, tmp_path):
    leave_run(tmp_path / "out", recipe(root, tmp_path, "model.path=some/other", f"model.revision={OLD}"))
    assert pin_commit(recipe(root, tmp_path)).model.revision == site.repos[NAME].commit


def test_a_model_of_this_disk_has_no_commit(root, tmp_path, tiny_pipelines):
    mine = recipe(root, tmp_path, "model.path=tiny:sd3")
    assert pin_commit(mine) is mine
    fetch_model(mine, WORLD)
    require_separate_inputs(recipe(root, tmp_path))  # a Hub id is not a path that --overwrite could delete
