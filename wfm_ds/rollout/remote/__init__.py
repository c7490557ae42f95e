"""Rollouts in other processes: workers, their coordinator, and the weights they receive."""
