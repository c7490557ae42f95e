"""DeepSpeed engine for the denoiser, and the policies (sets of weights) that the denoiser can run with."""
