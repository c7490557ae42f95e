"""Checks of a model family against its contract, on a tiny pipeline: `python -m wfm_ds.models.check`.

The reference is always the diffusers pipeline of the same folder.
"""
