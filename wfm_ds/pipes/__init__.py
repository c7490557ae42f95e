"""Messages between processes over ZeroMQ: tasks, leases, results, bulk data. Independent of models and training."""
