"""Processes of one node: launcher, workers and watchdogs, and the scheduler environments that start them."""
