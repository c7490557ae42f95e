"""The command `wfm`: one module per subcommand."""
