"""One run: its folder, its copies in a storage, what it is made of, and how it ends."""
