"""What is wrong with a command that a launcher can tell at once: the file of the task, and the files that a task needs.

Workers tell the same, once they have loaded torch, seconds later. The one idea: what is refused here, a worker would
refuse in the same words with the same exit code; whatever is in doubt passes. Imports no torch and nothing of the
user's. The number of weights, the devices and the run directory are checked where they are used (`launch`, `launcher`).
"""

from __future__ import annotations

from contextlib import suppress

from hetseq import registry
from hetseq.config.sections import Config


def check_command(config: Config) -> None:
    """Refuse what no worker of this node could begin with. Raises HetSeqError."""
    task, user_dir = config.task.task, config.task.user_dir
    registry.check_user_dir(user_dir)
    if registry.is_address(task):
        registry.check_address(task)
    elif user_dir is None:
        registry.check_name("task", task)
        with suppress(OSError):  # a file that goes while it is looked at: the task says what it lacks
            registry.check_files(task, config)
