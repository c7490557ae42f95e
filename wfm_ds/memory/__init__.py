"""Estimates of memory and forward passes, and advice on what to change when memory is short."""
