"""Model families: one interface for diffusers pipelines, with text, latents, noise levels and guidance."""
