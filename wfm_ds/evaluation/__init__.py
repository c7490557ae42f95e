"""Comparison of models on the same prompts and seeds."""
