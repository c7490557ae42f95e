"""The command `wfm`, with a subcommand for each program of this package."""
