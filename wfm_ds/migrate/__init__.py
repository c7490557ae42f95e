"""`python -m wfm_ds.migrate`."""
