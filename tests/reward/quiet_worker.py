"""`python -m quiet_worker`: a process that does nothing until its stdin is closed. What it says, a test says for it."""

import sys

if __name__ == "__main__":
    sys.stdin.read()
