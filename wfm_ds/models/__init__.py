"""Model families: one common interface to all supported diffusers pipelines."""
