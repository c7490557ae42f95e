"""Estimates of memory, and advice on recipe keys that save memory."""
