"""Denoising as plain arithmetic: noise levels, plans of steps, solvers, and keyed noise."""
