"""Training loops, and the setup, checks, validation and checkpoints around them."""
