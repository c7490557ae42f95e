"""Algorithmic baselines: our own plain re-implementations of published formulas, nobody's product."""
