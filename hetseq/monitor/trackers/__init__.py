"""Trackers: where the rows and events of a run are sent besides its directory."""
