"""How much of a step each rank takes, learned from measured times. Pure: no files, no network, no torch."""
