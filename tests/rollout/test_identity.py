"""Which files of the user's own a trainer and its workers must have in common."""

import sys

import pytest

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout.identity import own_code, require_same

SOURCE = """\
from wfm_ds.recipe.algorithms import RlSettings

class Keys(RlSettings):
    pass

class Mine:
    Settings = Keys
"""


def recipe(algorithm):
    return Recipe.model_validate(
        {
            "run": {"output_dir": "out", "steps": 3},
            "model": {"path": "tiny:sd3"},
            "data": {"kind": "prompts", "path": "p"},
            "sampling": {"height": 32, "width": 32},
            "algorithm": {"name": algorithm},
            "rollout": {"group_size": 4},
            "reward": {"functions": [{"name": "color"}]},
        }
    )


def test_another_version_of_the_users_file_is_another_identity(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "versioned.py").write_text(SOURCE)
    ours = own_code(recipe("versioned:Mine"))
    assert ours.keys() == {"versioned:Mine"}
    (tmp_path / "versioned.py").write_text(SOURCE + "\n# changed\n")
    theirs = own_code(recipe("versioned:Mine"))
    assert theirs != ours
    with pytest.raises(RecipeError, match="classes of your own differ from the trainer's"):
        require_same({"classes of your own": str(theirs)}, {"classes of your own": str(ours)})
    sys.modules.pop("versioned")


def test_an_algorithm_of_ours_has_no_such_file():
    assert own_code(recipe("diffusion_nft")) == {}
