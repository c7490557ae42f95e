"""The DeepSpeed engine around the denoiser, and the policies that it can compute with."""
