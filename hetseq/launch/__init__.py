"""The processes of one node: launcher, workers, watchdogs, environments of schedulers."""
