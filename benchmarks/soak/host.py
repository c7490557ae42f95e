"""`python -m benchmarks.soak.host FOLDER`: what rank 0 of an async run has: the rollout hub with the workers that it
starts, and the reward service. Runs until stdin is closed; says on stdout when it is ready, and how it was."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.samples import CHECKSUM
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.rewards import RewardService
from wfm_ds.rollout.service import RolloutService, WorkerDevice
from wfm_reward.rewards.jpeg import JpegIncompressibility

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny" / "sd3_nft_async.yaml"
WORKERS, SCORERS = 3, 2  # rollout workers, and workers of each of two rewards
LOST_AFTER_S = 5.0
STATUS_S = 10.0


def overrides(folder: Path) -> list[str]:
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
    """Starts workers whose pictures need no model."""

    def worker_command(self, name: str, place: WorkerDevice) -> list[str]:
        python, _, _, _, *options = super().worker_command(name, place)
        words = [str(RECIPE), *overrides(self.recipe.run.output_dir)]
        return [python, "-m", "benchmarks.soak.worker", *words, *options]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak.host", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    logging.basicConfig(level=logging.INFO, format="%(asctime)s host %(levelname)s %(message)s")
    recipe = recipe_file.load_recipe(RECIPE, overrides(folder))
    assert recipe.reward is not None
    with RewardService(recipe.reward, folder / "reward") as rewards:
        rollouts = Rollouts(recipe, {}, rewards.endpoint, num_ranks=1)
        try:
            _say({"ready": rollouts.endpoint})
            sys.stdin.read()
            status = rollouts.broker.request_status().result(STATUS_S)
            _say({"counts": dict(status.counts), "given up": rollouts.worker_failures()})
        finally:
            rollouts.stop()
    return 0


def _say(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
