"""Everything of a run except its training loop: output folder, S3 copies, model loading, Hub export, shutdown."""
