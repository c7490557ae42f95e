"""Stress test of message pipes and reward service: many samples, one process killed every few seconds, every byte
checked."""
