"""The tasks that come with HetSeq, built only on the names that `hetseq` exports."""

import importlib
import sys

if __name__ == "tasks":  # the folder at the top of a checkout: the same modules, see hetseq.system.short_names
    sys.modules[__name__] = importlib.import_module("hetseq.tasks")
