"""The recipe: its schema, how it is read and checked, and the sizes derived from it."""
