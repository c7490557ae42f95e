"""What people watch: metrics, progress, samples as files and pages."""
