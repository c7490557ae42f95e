"""Speed and cost, each a `python -m benchmarks.X`; results/ holds what was measured, with machine and date."""
