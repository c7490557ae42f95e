"""Saving and restoring of checkpoints, for any number of ranks and any ZeRO stage."""
