"""Generation and scoring of the samples of an RL step, on the training ranks or by rollout workers."""

TASK_KIND = "denoise"  # kind of the tasks that workers lease
