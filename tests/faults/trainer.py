"""A trainer process that scores COUNT images of SIZE x SIZE: `python trainer.py FOLDER TIMEOUT_S COUNT SIZE`.

It uses the reward service in FOLDER and prints "submitted" after submission. When all scores have arrived, it prints
the failure of each sample, or null, as JSON.
"""

import json
import sys

import numpy as np

from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.types import MediaBatch


def main(folder, timeout_s, count, size):
    endpoint, count, size = f"{folder}/pipes.json", int(count), int(size)
    reward = "probe_rewards:Brightness"
    recipe = RewardRecipe(functions=[{"name": reward}], spawn=False, endpoint=endpoint, timeout_s=float(timeout_s))
    client = RewardClient(endpoint, recipe, "run", "rank0")
    media = np.zeros((count, size, size, 3), np.uint8)
    ids = [f"s{i}" for i in range(count)]
    client.submit(MediaBatch(media=media, sample_ids=ids, prompts=[""] * count, metadata=[{}] * count))
    sys.stdout.write("submitted\n")
    sys.stdout.flush()
    scores = client.wait()
    client.close()
    sys.stdout.write(json.dumps({sample_id: scores[sample_id][reward].failure for sample_id in scores}))


if __name__ == "__main__":
    main(*sys.argv[1:])
