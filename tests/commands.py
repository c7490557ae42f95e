"""Run commands of `wfm` in this process."""

from wfm_ds.cli.main import main


def wfm_command(name):
    """Return a function that runs `wfm NAME WORD...` for a list of words and returns the exit code."""
    return lambda words: main([*name.split(), *map(str, words)])
