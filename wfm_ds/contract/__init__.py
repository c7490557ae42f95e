"""The contract of a model family, as checks on a tiny pipeline of its: `python -m wfm_ds.models.check`.

The reference is always the stock diffusers pipeline of the same folder.
"""
