"""`python -m wfm_ds.doctor`."""
