"""DeepSpeed around the denoiser, and the policies that its weights can show."""
