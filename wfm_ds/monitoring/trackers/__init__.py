"""Experiment trackers: one module per library, which is imported when a run starts."""
