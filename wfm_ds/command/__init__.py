"""The command `wfm`: one name for the programs of this package, and no second way of doing anything."""
