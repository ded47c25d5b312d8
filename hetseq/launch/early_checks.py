"""Early checks: errors in a command that the launcher finds at once, in the task's file and in the files it needs.

Workers would report the same seconds later, after loading torch. The one idea: an error found here is one that a worker
would report in the same words with the same exit code; doubtful cases pass. Imports neither torch nor user code. The
number of weights, the devices and the rest of the run directory are checked where they are used (`launch`, `launcher`).
"""

from __future__ import annotations

from contextlib import suppress

from hetseq import registry
from hetseq.cluster.membership.assignment import Errand, ScriptJob
from hetseq.config.sections import Config
from hetseq.config.tracker_specs import check_packages
from hetseq.run_directory import check_unused


def check_command(config: Config, errand: Errand | None = None) -> None:
    """Refuse a command with which no worker of this node could start. Raises HetSeqError."""
    task, user_dir = config.task.task, config.task.user_dir
    check_packages(config.log.tracker_specs())
    if config.distributed.meeting_url is None:  # otherwise it may be the directory of another node that is used
        check_unused(config.checkpoint.save_dir, begins_anew=config.checkpoint.which_checkpoint != "latest")
    registry.check_user_dir(user_dir)
    if isinstance(errand, ScriptJob):
        if not errand.is_module:  # the file of a module is found by the import of its package
            registry.check_address(errand.script)
    elif registry.is_address(task):
        registry.check_address(task)
    elif user_dir is None:
        registry.check_name("task", task)
        with suppress(OSError):  # a file deleted meanwhile: the task reports it
            registry.check_files(task, config)
