"""All shipped recipes by name, loaded a single time for all test files."""

from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.shipped_recipes import list_recipe_names, require_recipe

SHIPPED = {name: load_recipe(require_recipe(name)) for name in list_recipe_names()}
