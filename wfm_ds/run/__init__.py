"""A run: its folder, its copies in a storage, its model and memory, and its shutdown."""
