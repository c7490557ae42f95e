"""Access to local files and S3 objects, with atomic writes and verified transfers."""
