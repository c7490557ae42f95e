"""GPU runs rehearsed on a machine without a GPU: `python -m benchmarks.rehearsal`."""
