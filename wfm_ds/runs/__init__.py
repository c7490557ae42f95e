"""All parts of a run except the training loop: output folder, S3 copies, model loading, Hub export, shutdown."""
