"""Recipes: the schema, loading and validation of recipe files, and sizes derived from a recipe."""
