"""Train with HetSeq: `python train.py OPTIONS` is `hetseq train OPTIONS`, with `checkpoints` as its run directory.

One process, MNIST:      python train.py --task mnist --data DIR --batch-size 64 --max-epoch 1 --save-dir RUN
Three unequal workers:   python train.py ... --ranks 3 --balance 5,2,1
"""

from __future__ import annotations

import sys

from hetseq.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], save_dir="checkpoints"))
