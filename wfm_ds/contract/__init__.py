"""Checks of a model family against its contract, on a tiny pipeline. `wfm models check` runs them.

The results are compared with the diffusers pipeline in the same folder.
"""
