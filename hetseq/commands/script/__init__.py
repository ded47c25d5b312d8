"""`hetseq script`: batch scripts for schedulers."""
