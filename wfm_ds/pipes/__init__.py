"""Messages between processes over ZeroMQ: tasks, leases, results, bulk data. Knows nothing of models or training."""
