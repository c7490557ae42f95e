"""wfm_ds: a DeepSpeed post-trainer for diffusion world models. Importing it loads nothing heavy."""

__version__ = "0.1.0"
