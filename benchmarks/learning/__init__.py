"""The cost of a reward: algorithms on the quickstart's digits model, over the samples through the denoiser that they
take. `__main__.py` is the study, `hacking.py` another one on a judge that can be fooled."""
