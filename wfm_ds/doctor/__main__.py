"""`python -m wfm_ds.doctor`."""

import sys

from wfm_ds.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
