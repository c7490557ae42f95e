"""The recipe's `algorithm` section: one file and class for each algorithm, told apart by `name`."""

from typing import Annotated

from pydantic import Field

from wfm_ds.recipe.algorithms.base import AlgorithmSettings as AlgorithmSettings
from wfm_ds.recipe.algorithms.base import RlSections as RlSections
from wfm_ds.recipe.algorithms.base import RlSettings as RlSettings
from wfm_ds.recipe.algorithms.base import num_of_share as num_of_share
from wfm_ds.recipe.algorithms.ddrl import DdrlAlgorithm as DdrlAlgorithm
from wfm_ds.recipe.algorithms.diffusion_nft import DecaySchedule as DecaySchedule
from wfm_ds.recipe.algorithms.diffusion_nft import NftAlgorithm as NftAlgorithm
from wfm_ds.recipe.algorithms.flow_grpo import FlowGrpoAlgorithm as FlowGrpoAlgorithm
from wfm_ds.recipe.algorithms.sft import SftAlgorithm as SftAlgorithm

Algorithm = Annotated[SftAlgorithm | NftAlgorithm | FlowGrpoAlgorithm | DdrlAlgorithm, Field(discriminator="name")]
