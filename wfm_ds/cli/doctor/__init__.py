"""`wfm doctor`: check this machine, and whether it can train a recipe."""
