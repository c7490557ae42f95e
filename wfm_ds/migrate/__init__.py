"""Convert Cosmos-RL configurations to recipes: `python -m wfm_ds.migrate`."""
