"""The launcher of torchft's side: its lighthouse, and for each replica group a torchrun that restarts its rank.

python -m soak_runs.groups GROUPS
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

from soak_runs.with_torchft import GROUP

SCRIPT = Path(__file__).with_name("with_torchft.py")
#: short, so that the others do not wait long for a group that was killed
WAIT_MS, TICK_MS = 500, 20


def main() -> int:
    """Run the groups until SIGTERM, which each of them is sent."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=WAIT_MS, quorum_tick_ms=TICK_MS, heartbeat_timeout_ms=WAIT_MS
    )  # fmt: skip
    words = ["--standalone", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100000", "--monitor-interval=0.1"]
    groups = []
    for group in range(int(sys.argv[1])):
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), GROUP: str(group)}
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(SCRIPT)]
        groups.append(subprocess.Popen(command, env=environment))

    def pass_on(number: int, _: object) -> None:
        for process in groups:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    codes = [process.wait() for process in groups]
    lighthouse.shutdown()
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
