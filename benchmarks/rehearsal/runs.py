"""Real runs on the simulated machine: the project's recipes, loops and engine, with simulated ranks and rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.rehearsal.record import Record
from benchmarks.rehearsal.watch import watch_windows

if TYPE_CHECKING:
    from wfm_ds.training.diffusion_builder import DiffusionLoop as Loop

RECIPES = Path(__file__).resolve().parents[2] / "tests" / "recipes"
IMAGES = {"paired": "images", "pairs": "pairs.jsonl"}  # by data.kind, in the folder of digits
QUIET = (
    *("validation.every=0", "validation.at_start=false", "checkpoint.every=0", "logging.console=false"),
    *("logging.sample_every=0", "logging.tensorboard=false", "run.steps=100"),
)


class FakeRewards:
    """Replaces the client of the reward service: accepts samples and returns immediately."""

    names: Sequence[str] = ()
    reference_rewards: Sequence[str] = ()
    sound_rewards: Sequence[str] = ()

    def submit(self, batch: Any, failures: Any = ()) -> None:
        assert len(batch.media) == len(batch.sample_ids)

    def wait(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@contextlib.contextmanager
def open_loop(record: Record, recipe_name: str, overrides: Sequence[str], folder: Path) -> Iterator[Loop]:
    """Build the loop of a tiny recipe and watch its events. Use inside `fake_gpus`."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as zero3

    from wfm_ds.data.clip_layout import ClipLayout
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.rollout.captioned_groups import CaptionedGroups
    from wfm_ds.rollout.colocated import ColocatedSource
    from wfm_ds.runs.model_loading import load_model
    from wfm_ds.runs.output_folder import RunStart
    from wfm_ds.training import caches, diffusion_builder
    from wfm_ds.training.checkpoints import Checkpoints
    from wfm_ds.training.exporter import Exporter
    from wfm_ds.training.preflight import check_and_load_data
    from wfm_ds.training.rl import RlLoop
    from wfm_ds.training.validation import Validator
    from wfm_ds.training.validation_frames import ValidationSamples

    # A separate cache, because embeddings are made up.
    paths = [f"run.output_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    recipe = recipe_file.load_recipe(RECIPES / f"{recipe_name}.yaml", [*paths, *QUIET, *overrides])
    world = World.join().with_replicas(recipe.engine.sequence_parallel)
    with contextlib.ExitStack() as held:
        # Skip ZeRO-3's check that all ranks gather in the same order, because it reads values from the device.
        held.enter_context(mock.patch.object(zero3, "assert_ints_same_as_other_ranks"))
        # Encode all texts on this rank, because the other ranks do not exist.
        held.enter_context(mock.patch.object(caches, "ranks_per_node", return_value=1))
        data, model = check_and_load_data(recipe, world.size), load_model(recipe, world.device)
        algorithm = diffusion_builder.make_rl_algorithm(recipe, model)
        job = diffusion_builder.build_job(recipe, world, StopFlag(), model, data, RunStart(), None, held)
        parts = Exporter(job), Checkpoints(job)
        if algorithm is None:
            loop: Loop = diffusion_builder.build_sft_loop(job, data, *parts, None, held)
        else:
            groups = diffusion_builder.build_group_source(job, algorithm, data, None, held)
            if isinstance(groups, CaptionedGroups):  # captions of other ranks cannot be gathered
                groups.local_groups = range(groups.num_groups)
            source = add_fake_scores(ColocatedSource(job, groups, FakeRewards(), algorithm), recipe)  # type: ignore[arg-type]
            layout = ClipLayout(recipe.sampling.num_frames)
            samples = ValidationSamples(prompts=data.validation_prompts, layout=layout)
            loop = RlLoop(job, algorithm, source, Validator(job, samples), *parts)
        with watch_windows(record):
            yield loop


def add_fake_scores(source: Any, recipe: Any) -> Any:
    """Give the source made-up scores for all ranks' samples, because other ranks cannot send theirs."""
    from wfm_ds.types import Score

    names = [function.name for function in recipe.rl.reward.functions]

    def fake_scores(rollouts: Any) -> list[dict[str, Score]]:
        return [
            {n: Score(sample_id=m.sample_id, reward=n, value=i % 7 / 7, seconds=0.0) for n in names}
            for i, m in enumerate(rollouts.samples)
        ]

    source.collect_rewards = fake_scores
    return source


def data_overrides(recipe_name: str, folder: Path) -> list[str]:
    """Write the data of a recipe into `folder`: two prompts, captioned digits or pairs of digits. Return its
    overrides."""
    if images := image_folder(recipe_name):
        from wfm_ds.demos.digits_data import write_digits

        write_digits(folder / "digits")
        return [f"data.path={folder / 'digits' / images}"]
    prompts = folder / "prompts"
    prompts.mkdir()
    (prompts / "train.txt").write_text("a red circle on white\na green circle on white\n")
    return [f"data.path={prompts}", "validation.num_prompts=1"]


def image_folder(recipe_name: str) -> str | None:
    """Return the entry of the digits folder on which a tiny recipe trains, or None if it trains on prompts."""
    from wfm_ds.recipe import file as recipe_file

    return IMAGES.get(recipe_file.load_recipe(RECIPES / f"{recipe_name}.yaml").data.kind)
