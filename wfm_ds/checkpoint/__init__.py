"""Saves and restores checkpoints, for any number of ranks and any ZeRO stage."""
