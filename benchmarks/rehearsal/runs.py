"""Real runs on the pretended machine: the project's own recipes, loops and engine, with other ranks and rewards that
answer at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.rehearsal.record import Record
from benchmarks.rehearsal.watch import watched

if TYPE_CHECKING:
    from wfm_ds.training.diffusion_builder import DiffusionLoop as Loop

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "tiny"
IMAGES = {"paired": "images", "pairs": "pairs.jsonl"}  # by data.kind, in the folder of digits
QUIET = (
    *("validation.every=0", "validation.at_start=false", "checkpoint.every=0", "logging.console=false"),
    *("logging.sample_every=0", "logging.tensorboard=false", "run.steps=100"),
)


class Rewards:
    """Stands for the reward service, which is another process: takes media, and has nothing to wait for."""

    def submit(self, batch: Any) -> None:
        assert len(batch.media) == len(batch.sample_ids)

    def wait(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@contextlib.contextmanager
def loop_of(record: Record, recipe_name: str, overrides: Sequence[str], folder: Path) -> Iterator[Loop]:
    """The loop of a tiny recipe with all that it uses, watched; inside `fake_gpus`."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as zero3

    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.rollout.colocated import ColocatedSource
    from wfm_ds.rollout.groups import CaptionedGroups
    from wfm_ds.run.model_loading import load_model
    from wfm_ds.run.output_folder import RunStart
    from wfm_ds.training import diffusion_builder, text_precompute
    from wfm_ds.training.checkpoints import Checkpoints
    from wfm_ds.training.exporter import Exporter
    from wfm_ds.training.preflight import check_and_load_data
    from wfm_ds.training.rl import RlLoop
    from wfm_ds.training.validation import Validator

    # Its own cache: embeddings are made up, and not for the user's.
    places = [f"run.output_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    recipe = recipe_file.load_recipe(RECIPES / f"{recipe_name}.yaml", [*places, *QUIET, *overrides])
    world = World.join().with_replicas(recipe.engine.sequence_parallel)
    with contextlib.ExitStack() as held:
        # ZeRO-3 compares the order of its gathers with rank 0's: numbers that it reads back from the device.
        held.enter_context(mock.patch.object(zero3, "assert_ints_same_as_other_ranks"))
        # The shares of texts of other ranks are not there.
        held.enter_context(mock.patch.object(text_precompute, "ranks_per_node", return_value=1))
        data, model = check_and_load_data(recipe, world.size), load_model(recipe, world.device)
        algorithm = diffusion_builder.make_rl_algorithm(recipe, model)
        job = diffusion_builder.build_job(recipe, world, StopFlag(), model, data, RunStart(), None, held)
        parts = Exporter(job), Checkpoints(job)
        if algorithm is None:
            loop: Loop = diffusion_builder.build_sft_loop(job, data, *parts, None, held)
        else:
            groups = diffusion_builder.build_group_source(job, algorithm, data, held)
            if isinstance(groups, CaptionedGroups):  # the captions of other ranks' groups are not there to be gathered
                groups.local_groups = range(groups.num_groups)
            source = scored(ColocatedSource(job, groups, Rewards(), algorithm), recipe)  # type: ignore[arg-type]
            loop = RlLoop(job, algorithm, source, Validator(job, data.validation_prompts, rewards=None), *parts)
        with watched(record, job):
            yield loop


def scored(source: Any, recipe: Any) -> Any:
    """The source with scores of all ranks' samples: the rewards of other ranks are not there to be gathered."""
    from wfm_ds.types import Score

    names = [function.name for function in recipe.rl.reward.functions]

    def scores(rollouts: Any) -> list[dict[str, Score]]:
        return [
            {n: Score(sample_id=m.sample_id, reward=n, value=i % 7 / 7, seconds=0.0) for n in names}
            for i, m in enumerate(rollouts.members)
        ]

    source.scores = scores
    return source


def data(recipe_name: str, folder: Path) -> list[str]:
    """Overrides that give a recipe its data, written into `folder`: two prompts, or digits captioned or in pairs."""
    if reads_images(recipe_name):
        from wfm_ds.data.digits import write_digits

        write_digits(folder / "digits")
        return [f"data.path={folder / 'digits' / IMAGES[kind_of(recipe_name)]}"]
    prompts = folder / "prompts"
    prompts.mkdir()
    (prompts / "train.txt").write_text("a red circle on white\na green circle on white\n")
    return [f"data.path={prompts}", "validation.num_prompts=1"]


def reads_images(recipe_name: str) -> bool:
    """Return whether a tiny recipe trains on media of the user's."""
    return kind_of(recipe_name) in IMAGES


def kind_of(recipe_name: str) -> str:
    from wfm_ds.recipe import file as recipe_file

    return recipe_file.load_recipe(RECIPES / f"{recipe_name}.yaml").data.kind
