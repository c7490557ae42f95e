"""A soak of pipes and reward service: many samples, one process killed every few seconds, every byte checked."""
