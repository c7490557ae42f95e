"""Model families: a diffusers pipeline behind one interface, with its text, latents, noise levels and guidance."""
