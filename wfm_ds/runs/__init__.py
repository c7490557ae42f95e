"""Parts of a run other than its training loop: output folder, S3 copies, model loading, Hub export, shutdown."""
