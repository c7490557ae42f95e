"""Files and objects, on this machine or in S3: complete or absent, verified. Knows nothing of training."""
