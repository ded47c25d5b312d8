"""A user's script for tests that kill it: saves two names a step until it is killed, or to the end.

`PATH LAST INTERVAL MODE`: prints `complete N` when the tag of step N is complete, and `durable N` once it has waited
for the disk, at every third step. MODE "raise" ends it with an exception between two names.
"""

from __future__ import annotations

import sys

import hetseq.nebula as nm
from tests.support.nebula import state_of


def main() -> None:
    """The script from its first statement to its end."""
    path, last, interval, mode = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    nm.init(path, interval, num_of_version_in_retention=3)
    latest = nm.get_latest_checkpoint()
    step = int(latest.load("model")["step"]) if latest.tag else 0
    while step < last:
        step += 1
        checkpoint = nm.Checkpoint(f"step{step}", -1 if mode == "raise" else 2)
        checkpoint.save("model", state_of(step))
        if mode == "raise" and step == last:
            raise SystemError("as a bug would")
        checkpoint.save("optimizer", state_of(step))
        print("complete", step, flush=True)
        if step % 3 == 0:
            checkpoint.wait()
            print("durable", step, flush=True)


if __name__ == "__main__":
    main()
