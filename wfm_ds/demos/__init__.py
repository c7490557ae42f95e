"""`wfm quickstart`."""
