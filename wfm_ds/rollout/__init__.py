"""Who makes the samples of an RL step: the training ranks, or other processes; and who scores them."""

KIND = "denoise"  # of the tasks that workers lease
