"""Generates and scores the samples of an RL step, on the training ranks or in worker processes."""

TASK_KIND = "denoise"  # kind of the tasks that workers lease
