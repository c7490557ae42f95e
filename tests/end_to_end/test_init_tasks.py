"""`wfm init`, `wfm check` and two training steps with --tiny, for every task."""

import os
import subprocess
import sys

import pytest

TASKS = """
sft    --data digits/images --model tiny:sd3
full   --data digits/images --model tiny:sd3 --full
video  --data brightness --model tiny:wan21 --task sft
dpo    --data digits/pairs.jsonl --model tiny:sd3
rl     --data colors.txt --model tiny:sd3 --rl color --held-out jpeg_compressibility
frames --data digits/images --model tiny:wan22_i2v --rl motion --held-out consistency
actions --data brightness --model tiny:cosmos3
moves  --data brightness --model tiny:cosmos3 --rl brightness --held-out motion
distill --data colors.txt --model tiny:sd3 --task distill --held-out jpeg_compressibility
vlm    --data squares --model tiny:qwen25vl
"""
# One process imports torch and the model families once.
SCRIPT = """
import sys
from pathlib import Path
from wfm_ds.cli.main import main
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.demos.tiny_data import load_tiny_recipe, write_action_clips
from wfm_ds.distributed.lifecycle import StopFlag
from wfm_ds.distributed.world import World
from wfm_ds.runs.shutdown import RunShutdown
from wfm_ds.train import prepare_and_train

write_digits(Path("digits"))
write_squares(Path("squares"))
write_action_clips(Path("brightness"))
Path("colors.txt").write_text("".join(f"a {c} {t}\\n" for c in ("red", "green", "blue") for t in ("cup", "car", "hat")))
tasks = [line.split() for line in sys.argv[1].strip().splitlines()]
for name, *options in tasks:
    for words in (["init", *options, "--out", f"{name}.yaml"], ["check", f"{name}.yaml"]):
        assert main(words) == 0, (words, name)
world = World.join()
for name, *_ in tasks:
    recipe = load_tiny_recipe(Path(f"{name}.yaml"), [], world_size=1)
    outcome, _ = prepare_and_train(recipe, world, StopFlag(), RunShutdown(world))
    assert (outcome.status, outcome.step) == ("finished", 2), name
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_recipe_of_every_task_trains(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, TASKS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-4000:] + result.stdout[-2000:]
