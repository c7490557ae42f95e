"""Noise schedules, sampling plans, solvers and seeded noise."""
