"""`python -m wfm_ds.quickstart`."""

import sys

from wfm_ds.quickstart.command import main

if __name__ == "__main__":
    sys.exit(main())
