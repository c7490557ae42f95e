"""Algorithmic baselines: our own plain implementations of published formulas."""
