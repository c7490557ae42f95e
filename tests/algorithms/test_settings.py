"""Each RL algorithm: its settings class in recipe/ and its class in algorithms/ refer to each other."""

from each_case import check_each
from wfm_ds.algorithms.base import RlAlgorithm
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms import DdrlAlgorithm, FlowGrpoAlgorithm, NftAlgorithm
from wfm_ds.user_class import import_class


@check_each("settings", [DdrlAlgorithm, FlowGrpoAlgorithm, NftAlgorithm])
def test_settings_and_class_name_each_other(settings):
    found = import_class(settings.implementation, RlAlgorithm, key="algorithm.name", error=RecipeError)
    assert found.Settings is settings
