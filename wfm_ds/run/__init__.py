"""What belongs to a run besides its training loop: folder, copies in S3, model loading, memory estimate, shutdown."""
