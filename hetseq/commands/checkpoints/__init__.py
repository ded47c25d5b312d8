"""`hetseq checkpoints`: list, show, verify, remove and export checkpoints."""
