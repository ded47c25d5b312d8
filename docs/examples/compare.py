"""The largest difference of two runs' loss curves: `python docs/examples/compare.py RUN RUN [LIMIT]`.

Exits with 1 if the runs have other steps, or if the difference is above LIMIT.
"""

import json
import sys
from pathlib import Path


def losses(run: str) -> dict[int, float]:
    """The loss of each step that was not skipped; a step that was done twice counts as it was done last."""
    rows = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


if __name__ == "__main__":
    one, other = losses(sys.argv[1]), losses(sys.argv[2])
    limit = float(sys.argv[3]) if len(sys.argv) > 3 else float("inf")
    if one.keys() != other.keys():
        sys.exit(f"{len(one)} steps here and {len(other)} there: compare runs of the same length")
    difference = max(abs(one[step] - other[step]) for step in one)
    print(f"largest difference of the loss: {difference:.1e} nats over {len(one)} steps")
    sys.exit(difference > limit)
