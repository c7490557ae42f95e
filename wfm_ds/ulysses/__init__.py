"""Sequence parallelism: the ranks of a group share the tokens of one sample.

DeepSpeed-Ulysses (arXiv 2309.14509): tokens are shared everywhere but in attention, where heads are. Linear attention
and convolutions exchange less: a state that does not grow with the sequence, and the lines along a border.

`install` changes a diffusers transformer, `sequence_group` makes the groups; every other file but `exchange`,
`attention` and `base` is a family, named by the transformer class that it serves.
"""
