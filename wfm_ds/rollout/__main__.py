"""`python -m wfm_ds.rollout`."""

import sys

from wfm_ds.rollout.worker import main

if __name__ == "__main__":
    sys.exit(main())
