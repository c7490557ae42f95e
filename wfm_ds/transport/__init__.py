"""Task queue over ZeroMQ: clients submit tasks to a broker, and workers lease and run them."""
