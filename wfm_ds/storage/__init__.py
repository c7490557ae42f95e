"""Local files and S3 objects: written atomically and verified. Independent of training."""
