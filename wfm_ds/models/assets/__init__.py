"""Files of models: downloads, local folders, and disk caches of text embeddings and latents."""
