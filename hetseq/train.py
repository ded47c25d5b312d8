"""`python hetseq/train.py OPTIONS`, as in 2020: `hetseq train OPTIONS` with `checkpoints` as its run directory."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # this folder's modules are hetseq's, not top-level ones; its parent is where hetseq is found
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from hetseq.cli import main

    sys.exit(main(["train", *sys.argv[1:]], save_dir="checkpoints"))
