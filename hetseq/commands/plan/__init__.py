"""`hetseq plan` and `hetseq simulate`: predict the step time on other machines."""
