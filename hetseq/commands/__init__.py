"""The commands of `hetseq` other than `train`: one module or package for each."""
