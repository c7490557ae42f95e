"""Files of models: downloads, folders, caches of text embeddings and latents."""
