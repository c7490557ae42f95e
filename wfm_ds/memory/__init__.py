"""Estimates of memory and of the number of forward passes, and advice on recipe keys that save memory."""
