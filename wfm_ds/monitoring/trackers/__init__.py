"""Trackers by name: one file for each library, which is imported when a run starts."""
