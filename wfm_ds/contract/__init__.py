"""Checks a model family on a tiny pipeline, against the results of diffusers. `wfm models check` runs the checks."""
