"""`python -m wfm_ds`: does the same as the command `wfm`."""

import sys

from wfm_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
