"""Scripts with a training loop of their own, which `hetseq run` and tests run."""
