"""How much of a step each rank takes, learned from measured times. Pure: no files, no network, no torch.

In this package a rank means its data-parallel group, to which a share belongs; such a group is one rank today.
"""
