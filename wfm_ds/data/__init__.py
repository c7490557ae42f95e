"""Training data: scan images, videos and prompts, crop and order them, and shard them over ranks."""
