"""Communication between the launchers of a run: rendezvous, control channels and membership.

The launcher of each node keeps one authenticated control channel to the launcher of the head. `rendezvous` opens it,
`membership` decides which nodes take part. Neither imports torch.
"""
