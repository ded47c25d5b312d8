"""`hetseq plan`: what a step would cost on given machines."""
