"""Demos of `wfm quickstart`, and the commands `wfm data NAME` that write their data."""
