"""The recipe: what a user may write, how it is read and checked, and the numbers that follow from it."""
