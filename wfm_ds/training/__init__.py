"""Training loops, and the setup, checks, validation and checkpoints of training runs."""
