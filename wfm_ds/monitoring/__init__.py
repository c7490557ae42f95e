"""Output for people: metrics, progress, samples as files and pages."""
