"""How the launchers of several nodes find, know and talk to each other.

One launcher per node keeps one authenticated control channel to the launcher of the head. The rooms: `secret` (what the
nodes of one user share), `channel` (JSON records that no stranger can write, read again or reorder).
"""
