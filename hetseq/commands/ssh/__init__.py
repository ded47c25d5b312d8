"""`hetseq ssh`: start a run on several machines."""
