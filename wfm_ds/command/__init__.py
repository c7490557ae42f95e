"""The command `wfm`, which runs all programs of this package."""
