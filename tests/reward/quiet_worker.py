"""`python -m quiet_worker`: a process that waits until its stdin is closed. Tests send messages in its name."""

import sys

if __name__ == "__main__":
    sys.stdin.read()
