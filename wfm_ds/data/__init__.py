"""Training data: scan captioned images, videos and prompts, crop and order them, and shard them over ranks."""
