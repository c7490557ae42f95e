"""Recipes: the schema, reading and checking recipe files, and batch sizes derived from a recipe."""
