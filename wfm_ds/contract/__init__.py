"""Checks of a model family against its contract, on a tiny pipeline. `wfm models check` runs them.

The checks compare the family's results with the results of diffusers, which loads the same tiny pipeline.
"""
