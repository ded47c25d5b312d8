"""The commands of `hetseq` beside `train`: one module or package for each."""
