"""`python -m wfm_ds.rollout`."""

from wfm_ds.distributed.lifecycle import run_and_exit
from wfm_ds.rollout.worker import main

if __name__ == "__main__":
    run_and_exit(main)  # exits without waiting for an abandoned chunk
