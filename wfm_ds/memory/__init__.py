"""Estimates of memory and forward passes, and advice on recipe keys when memory is short."""
