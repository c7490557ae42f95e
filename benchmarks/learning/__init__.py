"""Studies on the demos.

`__main__.py` compares the number of samples that pass through the denoiser until an algorithm reaches a reward.
`hacking.py` studies a reward that can be hacked, `fewstep.py` distillation, and `video.py` videos.
"""
