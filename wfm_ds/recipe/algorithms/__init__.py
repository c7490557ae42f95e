"""The recipe's `algorithm` section. Each algorithm has its own module and settings class, selected by `name`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field, SerializeAsAny, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms.advantages import AdvantageSettings as AdvantageSettings
from wfm_ds.recipe.algorithms.base import INITIAL_LORA as INITIAL_LORA
from wfm_ds.recipe.algorithms.base import AdapterOptimizer as AdapterOptimizer
from wfm_ds.recipe.algorithms.base import AlgorithmSettings as AlgorithmSettings
from wfm_ds.recipe.algorithms.base import ConditioningFrameKeys as ConditioningFrameKeys
from wfm_ds.recipe.algorithms.base import ConditioningFramesSettings as ConditioningFramesSettings
from wfm_ds.recipe.algorithms.base import RlSections as RlSections
from wfm_ds.recipe.algorithms.base import RlSettings as RlSettings
from wfm_ds.recipe.algorithms.base import RolloutSettings as RolloutSettings
from wfm_ds.recipe.algorithms.base import TeacherSettings as TeacherSettings
from wfm_ds.recipe.algorithms.base import count_of_fraction as count_of_fraction
from wfm_ds.recipe.algorithms.ddrl import DdrlAlgorithm as DdrlAlgorithm
from wfm_ds.recipe.algorithms.distillation import FAKE_SCORE as FAKE_SCORE
from wfm_ds.recipe.algorithms.distillation import DistillationSettings as DistillationSettings
from wfm_ds.recipe.algorithms.distillation import Dmd2Algorithm as Dmd2Algorithm
from wfm_ds.recipe.algorithms.distillation import NoiseLevels as NoiseLevels
from wfm_ds.recipe.algorithms.distillation import OpdAlgorithm as OpdAlgorithm
from wfm_ds.recipe.algorithms.flow_grpo import FlowGrpoAlgorithm as FlowGrpoAlgorithm
from wfm_ds.recipe.algorithms.forward_process import AwmAlgorithm as AwmAlgorithm
from wfm_ds.recipe.algorithms.forward_process import DecaySchedule as DecaySchedule
from wfm_ds.recipe.algorithms.forward_process import DgpoAlgorithm as DgpoAlgorithm
from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings as ForwardProcessSettings
from wfm_ds.recipe.algorithms.forward_process import NftAlgorithm as NftAlgorithm
from wfm_ds.recipe.algorithms.forward_process import RamAlgorithm as RamAlgorithm
from wfm_ds.recipe.algorithms.supervised import DpoAlgorithm as DpoAlgorithm
from wfm_ds.recipe.algorithms.supervised import SftAlgorithm as SftAlgorithm
from wfm_ds.recipe.algorithms.supervised import SupervisedSettings as SupervisedSettings
from wfm_ds.recipe.algorithms.supervised import VlmSftAlgorithm as VlmSftAlgorithm
from wfm_ds.user_class import import_class, is_user_class


def find_user_settings(section: Any) -> type[RlSettings] | None:
    """Return the settings class of a user's algorithm, or None for a built-in one.

    section: mapping or settings object with the algorithm's `name`. Raises RecipeError if the algorithm cannot be
    imported or has no settings class.
    """
    name = section.get("name") if isinstance(section, dict) else getattr(section, "name", None)
    if not isinstance(name, str) or not is_user_class(name):
        return None
    settings = _import_settings(name)
    if isinstance(settings, RecipeError):
        raise settings
    return settings


@functools.cache  # caches errors too, so that a failing module is imported only once
def _import_settings(name: str) -> type[RlSettings] | RecipeError:
    try:
        algorithm = import_class(name, object, key="algorithm.name", error=RecipeError)
    except RecipeError as error:
        return error
    settings, base = getattr(algorithm, "Settings", None), getattr(algorithm, "base_settings", RlSettings)
    if not (isinstance(settings, type) and issubclass(settings, base)):
        return RecipeError(
            f"algorithm.name {name}: the class needs an attribute Settings, a subclass of {base.__name__}"
        )
    return settings


def _validate_algorithm(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
    try:
        own = find_user_settings(value)
    except RecipeError as error:
        line: Any = {"type": "value_error", "loc": ("name",), "input": value, "ctx": {"error": error}}
        raise ValidationError.from_exception_data("algorithm", [line]) from error
    return built_in(value) if own is None else own.model_validate(value)


if TYPE_CHECKING:
    Algorithm: TypeAlias = AlgorithmSettings
else:
    Algorithm = Annotated[
        SftAlgorithm
        | DpoAlgorithm
        | NftAlgorithm
        | AwmAlgorithm
        | RamAlgorithm
        | DgpoAlgorithm
        | FlowGrpoAlgorithm
        | DdrlAlgorithm
        | OpdAlgorithm
        | Dmd2Algorithm
        | VlmSftAlgorithm,
        Field(discriminator="name"),
        WrapValidator(_validate_algorithm),
        SerializeAsAny(),
    ]
