"""The processes of a run: ranks and collectives, startup and shutdown, logs, and detection of failed ranks."""
