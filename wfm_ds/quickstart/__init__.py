"""`python -m wfm_ds.quickstart`."""
