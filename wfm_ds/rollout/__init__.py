"""Generation of the samples of an RL step, by the training ranks or other processes, and their scores."""

KIND = "denoise"  # of the tasks that workers lease
