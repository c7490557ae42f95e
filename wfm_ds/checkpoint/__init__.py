"""Saving, restoring, exporting and converting weights, for any number of ranks and any ZeRO stage."""
