"""The host of a soak: the services of an async run's rank 0, which are the rollout broker with its workers and the
reward service. `python -m benchmarks.soak.host FOLDER` runs until stdin is closed. Prints to stdout when it is ready,
and the counts at the end."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.samples import CHECKSUM
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.remote.service import RolloutService, WorkerDevice
from wfm_ds.rollout.reward_service import RewardService
from wfm_reward.rewards.jpeg import JpegIncompressibility

RECIPE = Path(__file__).parents[2] / "tests" / "recipes" / "sd3_nft_async.yaml"
WORKERS, SCORERS = 3, 2  # rollout workers; workers for each of two rewards
LOST_AFTER_S = 5.0
STATUS_S = 10.0


def recipe_overrides(folder: Path) -> list[str]:
    rewards = [
        {"name": CHECKSUM, "workers": SCORERS, "max_batch": 8, "options": {"journal": str(folder / "scored")}},
        {"name": JpegIncompressibility.name, "workers": SCORERS, "max_batch": 8},
    ]
    return [
        f"run.output_dir={folder}",
        *(f"rollout.spawn={WORKERS}", "rollout.devices=[cpu]", f"rollout.worker_timeout_s={LOST_AFTER_S}"),
        f"reward.functions={json.dumps(rewards)}",
    ]


class Rollouts(RolloutService):
    """Starts workers that generate images without a model."""

    def worker_command(self, name: str, device: WorkerDevice) -> list[str]:
        python, _, _, _, _, *options = super().worker_command(name, device)
        words = [str(RECIPE), *recipe_overrides(self.recipe.run.output_dir)]
        return [python, "-m", "benchmarks.soak.worker", *words, *options]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak.host", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    logging.basicConfig(level=logging.INFO, format="%(asctime)s host %(levelname)s %(message)s")
    recipe = recipe_file.load_recipe(RECIPE, recipe_overrides(folder))
    assert recipe.reward is not None
    with RewardService(recipe.reward, folder / "reward") as rewards:
        rollouts = Rollouts(recipe, {}, rewards.endpoint, num_ranks=1)
        try:
            _write_line({"ready": rollouts.endpoint})
            sys.stdin.read()
            status = rollouts.broker.request_status().result(STATUS_S)
            _write_line({"counts": dict(status.counts), "failures": rollouts.worker_failures()})
        finally:
            rollouts.stop()
    return 0


def _write_line(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
