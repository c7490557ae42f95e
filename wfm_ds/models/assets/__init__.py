"""Model downloads, local model folders, and disk caches of text embeddings and latents."""
