"""The loops, and all that is assembled around them."""
