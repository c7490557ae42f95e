"""Checks of a model family against its contract, on a tiny pipeline: `wfm models check`.

The reference is always the diffusers pipeline of the same folder.
"""
