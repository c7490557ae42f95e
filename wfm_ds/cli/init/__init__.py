"""`wfm init`: inspect data and a model, ask for what is missing, and write a recipe with a comment on each value."""
