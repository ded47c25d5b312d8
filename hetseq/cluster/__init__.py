"""How the launchers of several nodes find, know and talk to each other.

One launcher per node keeps one authenticated control channel to the launcher of the head. `rendezvous` builds it,
`membership` decides who takes part. Neither imports torch.
"""
