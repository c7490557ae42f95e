"""Measurements of one GPU in an hour: `python -m benchmarks.gpu day` (docs/measurements.md)."""
