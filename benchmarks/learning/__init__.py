"""The cost of a reward: compare algorithms on the digits demo by the samples that pass through the denoiser.
`__main__.py` is the study; `hacking.py` is another study, with a reward that can be hacked."""
