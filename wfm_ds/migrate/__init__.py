"""Convert Cosmos-RL configurations to recipes: `wfm migrate`."""
