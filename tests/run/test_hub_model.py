"""The commit of a model of the hub: a new run takes the branch's, a run that goes on its own."""

import pytest
import torch

from hub_server import Repo, files_of, hub_server, use
from wfm_ds.distributed.world import World
from wfm_ds.errors import ModelError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.run.hub_model import agreed_commit, at_commit, fetch
from wfm_ds.run.place import require_inputs_elsewhere

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
    path = root / "recipes" / "tiny" / "sd3_sft.yaml"
    return recipe_file.load(path, [f"model.path={NAME}", f"run.output_dir={tmp_path / 'out'}", *words])


def leave_run(folder, of):
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_file.dump(of))


def test_a_new_run_takes_the_commit_that_the_branch_is_at(site, root, tmp_path):
    commit = site.repos[NAME].commit
    for words in ([], ["model.revision=v2"], [f"model.revision={commit}"]):
        found = at_commit(recipe(root, tmp_path, *words))
        assert found.model.revision == commit
        assert recipe_file.dump(found).count(commit) == 1
        assert agreed_commit(recipe(root, tmp_path, *words), WORLD, overwrite=False) == found
    assert site.sent == ["model_index.json"]
    fetch(found, WORLD)
    assert "transformer/diffusion_pytorch_model.safetensors" in site.sent
    with pytest.raises(ModelError, match="no branch, tag or commit v3"):
        at_commit(recipe(root, tmp_path, "model.revision=v3"))


def test_a_run_that_goes_on_takes_its_own(site, root, tmp_path):
    leave_run(tmp_path / "out", recipe(root, tmp_path, f"model.revision={OLD}"))
    assert at_commit(recipe(root, tmp_path)).model.revision == OLD
    assert at_commit(recipe(root, tmp_path, "model.revision=v2")).model.revision == OLD
    assert site.asked == 0
    new = recipe(root, tmp_path, f"run.output_dir={tmp_path / 'other'}", f"run.resume={tmp_path / 'out'}")
    assert at_commit(new).model.revision == OLD
    assert at_commit(recipe(root, tmp_path), overwrite=True).model.revision == site.repos[NAME].commit
    assert at_commit(recipe(root, tmp_path, f"model.revision={'cd' * 20}")).model.revision == "cd" * 20


def test_a_run_of_another_model_says_nothing(site, root, tmp_path):
    leave_run(tmp_path / "out", recipe(root, tmp_path, "model.path=some/other", f"model.revision={OLD}"))
    assert at_commit(recipe(root, tmp_path)).model.revision == site.repos[NAME].commit


def test_a_model_of_this_disk_has_no_commit(root, tmp_path, tiny_pipelines):
    mine = recipe(root, tmp_path, "model.path=tiny:sd3")
    assert at_commit(mine) is mine
    fetch(mine, WORLD)
    require_inputs_elsewhere(recipe(root, tmp_path))  # an id is no path that --overwrite could clear
