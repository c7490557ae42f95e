"""A run apart from its training loop: output folder, copies in S3, model loading, export to the Hub, shutdown."""
