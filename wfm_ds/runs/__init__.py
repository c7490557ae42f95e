"""Parts of a run other than its training loop: folder, copies in S3, model loading, memory estimate, shutdown."""
