"""`python -m wfm_ds`: equivalent to the command `wfm`."""

import sys

from wfm_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
