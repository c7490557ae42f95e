"""`python -m wfm_ds.migrate`."""

import sys

from wfm_ds.migrate.command import main

if __name__ == "__main__":
    sys.exit(main())
