"""Training data: scan and check captioned media and prompts, crop and order them, and shard them over the ranks."""
