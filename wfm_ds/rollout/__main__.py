"""`python -m wfm_ds.rollout`."""

from wfm_ds.distributed.lifecycle import entry
from wfm_ds.rollout.worker import main

if __name__ == "__main__":
    entry(main)  # exits without waiting for an abandoned chunk
