"""`wfm doctor`."""
