"""Output for users: metrics, progress, and samples as files and in trackers."""
