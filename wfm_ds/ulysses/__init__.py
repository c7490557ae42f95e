"""Sequence parallelism: the tokens of one sample are sharded over the ranks of a group.

As in DeepSpeed-Ulysses (arXiv 2309.14509), tokens are sharded everywhere except in attention, where heads are sharded.
Linear attention and convolutions exchange less data. `install_ulysses` changes a diffusers transformer in place.
"""
